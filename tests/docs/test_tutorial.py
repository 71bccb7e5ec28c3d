"""The tutorials run by their own commands, with the built wheel, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs_lib import __version__
from jobs_lib.devstack.places import cache_folder
from tests.support import wait_for
from tests.support.pages import ROOT, write_modules

PORTS = ("8000", "8001", "8010")


@dataclass
class Reader:
    """Follows a page: it runs each block of commands in a shell, some in terminals."""

    folder: Path
    env: dict[str, str]
    ports: dict[str, int]
    setup: str = ""
    """The commands at the start of each new terminal."""
    terminals: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By their numbers in the page."""

    def run(self, commands: str) -> str:
        """Run commands to their end; return their output."""
        done = subprocess.run(
            ["bash", "-e", "-c", self.setup + commands],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        log = self.folder / "terminals.log"
        said = log.read_text()[-3_000:] if log.exists() else ""
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}\n{said}"
        return done.stdout

    def expect(self, commands: str, output: str) -> None:
        """Run commands until they print this; those that change something run once."""
        wanted, changes = json.loads(output), re.search(r" -d | -X ", commands)

        def printed() -> bool:
            found = self.run(commands)
            if changes:
                assert json.loads(found) == wanted
            return bool(json.loads(found) == wanted)

        wait_for(printed, timeout=120, what=f"{commands} prints {output}")

    def open_terminal(self, commands: str) -> None:
        """Run commands that do not end, and wait until their port answers.

        What ran in that terminal before is stopped.
        """
        number = commands.split()[2].strip(",")
        self.close_terminals(number)
        with (self.folder / "terminals.log").open("ab") as log:
            terminal = subprocess.Popen(
                ["bash", "-e", "-c", self.setup + commands],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.terminals[number] = terminal
        for port in self.ports.values():
            if str(port) in commands:
                wait_for(lambda: answers(port), timeout=120, what=commands)  # noqa: B023

    def close_terminals(self, *numbers: str) -> None:
        """Press Ctrl-C in each of them."""
        found = [
            self.terminals.pop(number)
            for number in numbers or [*self.terminals]
            if number in self.terminals
        ]
        for terminal in found:
            with suppress(ProcessLookupError):
                os.killpg(terminal.pid, signal.SIGINT)
        for terminal in found:
            try:
                terminal.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(terminal.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    """Tell whether a server listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def find_ports() -> dict[str, int]:
    """A free port for each port of the page."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return dict(zip(PORTS, found, strict=True))


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    return Path(folder)


@pytest.fixture
def reader(tmp_path, folder, wheel):
    """A user who has Python and nothing else."""
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"jobs-lib=={__version__}\n")
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {wheel.parent}"
    (tmp_path / "home").mkdir()
    python = Path(sys._base_executable)  # type: ignore[attr-defined]
    ports = find_ports()
    env = {
        # The machine decides how pip reaches its index.
        **{name: value for name, value in os.environ.items() if name[:4] == "PIP_"},
        "PIP_CONSTRAINT": str(constraint),
        "PIP_FIND_LINKS": links.strip(),
        "HOME": str(tmp_path / "home"),
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "JOBS_LIB_CACHE_DIR": str(cache_folder()),
        "PARTNER_URL": f"http://127.0.0.1:{ports['8010']}",
    }
    made = Reader(folder, env, ports)
    yield made
    made.close_terminals()
    if (folder / ".jobs-lib").exists():
        made.run("jobs-lib dev down")


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_the_tutorial_is_done_by_its_own_commands(reader, folder):
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(
        ROOT / "examples/orders", folder, ignore=ignored, dirs_exist_ok=True
    )
    assert follow(reader, "docs/tutorial.md") == 3


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.guarantee("U3")
def test_the_tutorial_on_sharing_is_done_by_its_own_commands(reader, folder):
    assert len(write_modules("docs/share.md", folder)) == 6
    assert follow(reader, "docs/share.md") == 2


def follow(reader: Reader, path: str) -> int:
    """Follow a page; returns how many outputs it has shown."""
    page = (ROOT / path).read_text(encoding="utf-8")
    for port, free in reader.ports.items():
        page = page.replace(port, str(free))
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    shown = 0
    for (language, text), (following, output) in zip(
        blocks, [*blocks[1:], ("", "")], strict=True
    ):
        if language != "sh":
            continue
        if "jobs-lib dev env" in text:
            reader.setup = text
        elif text.startswith("# terminal"):
            reader.open_terminal(text)
        elif following == "json":
            shown += 1
            reader.expect(text, output)
        else:
            if "dev down" in text:
                reader.close_terminals()
            reader.run(text)
    return shown
