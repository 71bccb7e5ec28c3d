"""Servers and other users for the tests of the embedded stack."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs_lib.devstack.places import cache_folder
from jobs_lib.devstack.process import Account, as_account
from jobs_lib.devstack.stack import DevStack

PROJECT = Path(__file__).parents[2]
PACKAGES = Path(pytest.__file__).parents[1]

#: Runs `jobs-lib dev` as the command line does: a clear error gives exit code 2.
DEV = """
import sys
from jobs_lib.cli.dev import dev
from jobs_lib.errors import JobsError
try:
    dev(prog_name="jobs-lib dev")
except JobsError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture(autouse=True)
def no_servers_of_the_developer(monkeypatch):
    monkeypatch.delenv("JOBS_LIB_DATABASE_URL", raising=False)
    monkeypatch.delenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", raising=False)


@pytest.fixture
def stack(open_folder):
    stack = DevStack(open_folder / "project")
    yield stack
    stack.down()


@dataclass(frozen=True)
class User:
    """A user to run a command as, and an interpreter that this user can run."""

    name: str
    python: str
    home: Path

    def run(self, *arguments, code=DEV, cwd, **variables):
        """Run Python code as this user, with none of our environment."""
        entry = pwd.getpwnam(self.name)
        account = Account(entry.pw_uid, entry.pw_gid) if os.geteuid() == 0 else None
        return subprocess.run(
            [self.python, "-c", code, *arguments],
            cwd=cwd,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "PYTHONPATH": f"{PROJECT}:{PACKAGES}",
                "PYTHONDONTWRITEBYTECODE": "1",
                # A copied interpreter finds its own library here.
                "LD_LIBRARY_PATH": str(Path(self.python).parents[1] / "lib"),
                "JOBS_LIB_CACHE_DIR": str(self.home / "cache"),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **as_account(account),
        )


@pytest.fixture
def open_folder():
    """A folder that every user can reach; pytest's own folders are closed."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="jobs-lib-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ordinary_user(open_folder):
    """An ordinary user. Its home is closed to others and holds the jars."""
    if os.geteuid() != 0:
        return User(pwd.getpwuid(os.geteuid()).pw_name, sys.executable, open_folder)
    name = "nobody"
    if not _can(name, "test", "-r", str(PROJECT / "pyproject.toml")):
        pytest.skip(f"the user {name} cannot read this clone")
    home = open_folder / "home"
    jars = cache_folder() / "jars"
    if jars.exists():  # saves the download
        shutil.copytree(jars, home / "cache" / "jars")
    home.mkdir(exist_ok=True)
    entry = pwd.getpwnam(name)
    for path in (home, *home.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    home.chmod(0o700)
    return User(name, _python_for(name, open_folder), home)


def _python_for(name, folder):
    """This interpreter if the user can run it, else a copy that they can run."""
    if _can(name, sys.executable, "-c", "import encodings"):
        return sys.executable
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    source, copy = Path(sys.base_prefix), folder / "python"
    unneeded = shutil.ignore_patterns("test", "site-packages", "__pycache__", "idlelib")
    shutil.copytree(source / "lib" / minor, copy / "lib" / minor, ignore=unneeded)
    for library in (source / "lib").glob("libpython*.so*"):
        shutil.copy(library, copy / "lib")
    (copy / "bin").mkdir()
    shutil.copy(source / "bin" / minor, copy / "bin")
    return str(copy / "bin" / minor)


def _can(name, *argv):
    entry = pwd.getpwnam(name)
    try:
        tried = subprocess.run(
            argv,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return tried.returncode == 0
