"""Lines that a worker process prints for the test; each line stays whole."""

from __future__ import annotations

import os


def say(line: str) -> None:
    """Write a line to the standard output at once.

    The line is written in one piece. `print` writes the end of a line separately: then
    two threads can print both lines before both ends.
    """
    os.write(1, f"{line}\n".encode())
