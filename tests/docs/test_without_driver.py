"""The wheel with the extra `coordination` alone shares partitions, without a driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from jobs_lib.coordination.log_topic import WANTED
from tests.support.pages import write_modules

if TYPE_CHECKING:
    from pathlib import Path

NEEDS = (
    "error: jobs_lib needs psycopg: pip install 'jobs-lib[postgres]', or "
    "'jobs-lib[binary]' with a libpq\n"
)
LISTED = """
from importlib.metadata import distributions
print(*sorted({one.name.lower() for one in distributions()}))
"""
DRIVERS = {"alembic", "psycopg", "psycopg-binary", "psycopg-c", "psycopg-pool"}
DRIVERS |= {"psycopg_binary", "psycopg_pool", "psycopg2", "sqlalchemy"}
PAGE = "docs/coordination.md"


class Installed:
    """A virtual environment without anything of this checkout on its path.

    Args:
        folder: of the environment; commands run beside it.
        servers: Kafka's address, which the commands find in the environment.
    """

    def __init__(self, folder: Path, servers: str) -> None:
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self._env = {**kept, "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": servers}
        base = sys._base_executable  # type: ignore[attr-defined]
        self._done(base, "-m", "venv", folder)

    def install(self, *wanted: str) -> None:
        """Install packages by pip."""
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        self._done(self.folder / "bin/python", *pip, *wanted)

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        return self._run(self.folder / "bin" / name, *words)

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        """Start a program of the environment."""
        return subprocess.Popen(
            [self.folder / "bin" / name, *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder.parent,
            env={**self._env, "PYTHONUNBUFFERED": "1"},
        )

    def _run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder.parent,
            env=self._env,
        )

    def _done(self, *command: str | Path) -> None:
        done = self._run(*command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel, bootstrap_servers) -> Installed:
    """An environment with the wheel of this checkout, and the extra alone."""
    made = Installed(tmp_path_factory.mktemp("work") / "venv", bootstrap_servers)
    made.install(f"{wheel}[coordination]")
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_partitions_are_shared_where_no_driver_is_installed(
    installed, topic, bootstrap_servers
):
    listed = installed.run("python", "-c", LISTED).stdout.split()
    assert {"jobs-lib", "confluent-kafka"} <= {*listed}
    assert not DRIVERS & {*listed}

    # The consumer of the page, on topics of this test alone.
    orders, log = topic(1), topic(2, prefix="log", config=WANTED)
    folder = installed.folder.parent
    assert write_modules(PAGE, folder) == ["mailer.py"]
    code = (folder / "mailer.py").read_text(encoding="utf-8")
    assert "shop.coordination" in code
    code = code.replace('"shop.coordination"', repr(log))
    (folder / "mailer.py").write_text(code.replace('"orders"', repr(orders)))
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(orders, "value")
    producer.flush(30)
    consumer = installed.start("python", "mailer.py")
    try:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == f"{orders} 0 0\n"
        shown = installed.run("jobs-lib", "coordination", "show", "--log", log)
        assert shown.returncode == 0, shown.stderr
        assert "shop.mailer" in shown.stdout
        assert "mailer-0" in shown.stdout
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(60) == 0
    finally:
        consumer.kill()
        consumer.communicate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_else_says_what_to_install_where_no_driver_is(installed):
    code = "import jobs_lib\njobs_lib.App('shop')\n"
    (installed.folder.parent / "shop.py").write_text(code)
    for words in (
        *(["migrate"], ["run", "shop:app"], ["executor", "shop:app"], ["check"]),
        *(["jobs", "list"], ["topics", "plan", "shop:app"], ["reexport", "status"]),
    ):
        done = installed.run("jobs-lib", *words)
        assert (done.returncode, done.stderr, done.stdout) == (2, NEEDS, ""), words
    done = installed.run("python", "shop.py")
    assert done.returncode == 1
    assert done.stderr.endswith(NEEDS.replace("error", "ConfigurationError", 1))
    for words in (["--help"], ["coordination", "--help"], ["run", "--help"]):
        done = installed.run("jobs-lib", *words)
        assert done.returncode == 0, done.stderr
