"""Lists fit the terminal, and go whole into pipes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

ERROR = "OSError: the partner\nanswers HTTP 503 " + "and says no more " * 60 + "end"
ID = 1_234_567_890_123
ROWS = [(ID, "send_invoice", ERROR, None), (7, "send_mail", None, 1)]
CODE = f"""
from jobs_lib.cli.terminal import show
show(("id", "type", "error", "priority"), {ROWS!r}, False)
"""


def run_on_terminal(columns: int) -> list[str]:
    """Return the lines that a terminal of a given width shows."""
    main, other = pty.openpty()
    size = struct.pack("HHHH", 24, columns, 0, 0)
    fcntl.ioctl(other, termios.TIOCSWINSZ, size)
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=other,
        stdout=other,
        stderr=other,
        env=environment,
    ) as process:
        os.close(other)
        shown = b""
        while True:
            try:
                part = os.read(main, 65_536)
            except OSError:  # Linux reports thus that no process writes any more
                break
            if not part:
                break
            shown += part
    os.close(main)
    assert process.returncode == 0, shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_list_fits_the_terminal_and_cuts_no_number(columns):
    lines = run_on_terminal(columns)
    assert len(lines) == 6
    assert max(map(len, lines)) <= columns
    assert str(ID) in lines[3]
    assert "…" in lines[3]


def test_a_pipe_gets_each_value_whole_in_one_line_for_a_row():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert ERROR.replace("\n", r"\n") in lines[3]
