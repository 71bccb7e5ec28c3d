"""From an empty folder to the first job seen, by the commands of the README."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import click

from jobs_lib.devstack.places import cache_folder

_ROOT = Path(__file__).parents[1]
_SECONDS = 300.0


def measure_first_job() -> dict[str, float]:
    """Follow the README with the built wheel, in an empty virtual environment.

    What pip and Maven have downloaded before is in their caches.
    """
    section = (_ROOT / "README.md").read_text("utf-8").split("## In your code")[1]
    section = section.split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (shown,) = re.findall(r"```\n\n```\n(.*?)```", section, re.DOTALL)
    install, *commands = block.splitlines()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = _prepare(folder)
        service = folder / "service"
        service.mkdir()
        (service / "shop.py").write_text(code)
        began = time.perf_counter()
        _run(install, service, environment)
        installed = time.perf_counter()
        try:
            _run_until(commands, shown.splitlines()[0], service, environment)
            seen = time.perf_counter()
        finally:
            _run("jobs-lib dev down", service, environment)
    return {
        "first_job_commands": 1 + len(commands),
        "first_job_install_s": round(installed - began, 1),
        "first_job_after_install_s": round(seen - installed, 1),
    }


def _prepare(folder: Path) -> dict[str, str]:
    """Build the wheel, and make an environment in which pip installs it."""
    options = ["--no-deps", "--quiet", "--wheel-dir", str(folder), str(_ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
    venv.create(folder / "venv", with_pip=True)
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {folder}"
    return {
        **{name: value for name, value in os.environ.items() if name[:4] == "PIP_"},
        "HOME": os.environ.get("HOME", str(folder)),
        "JOBS_LIB_CACHE_DIR": str(cache_folder()),
        "PATH": f"{folder / 'venv/bin'}:/usr/local/bin:/usr/bin:/bin",
        "PIP_FIND_LINKS": links.strip(),
    }


def _run(command: str, folder: Path, environment: dict[str, str]) -> None:
    subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _run_until(
    commands: list[str], line: str, folder: Path, environment: dict[str, str]
) -> None:
    """Run the commands in one shell until they print a line."""
    log = folder / "log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-ec", "\n".join(commands)],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    deadline = time.monotonic() + _SECONDS
    try:
        while line not in log.read_text().splitlines():
            if shell.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(log.read_text())
            time.sleep(0.01)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGINT)
        shell.wait()
