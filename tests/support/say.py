"""What a worker process tells the test: whole lines, whichever threads say them."""

from __future__ import annotations

import os


def say(line: str) -> None:
    """Write a line to the standard output at once.

    In one piece: `print` writes the end of the line by itself, and of two threads both
    lines may come before both ends.
    """
    os.write(1, f"{line}\n".encode())
