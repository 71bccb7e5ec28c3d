"""Free ports on 127.0.0.1, and who has the taken ones."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from jobs_lib.errors import DevStackError


def free_port() -> int:
    """A port that is free now. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise DevStackError(
                f"port {port} cannot be used: {os.strerror(error.errno or 0)}"
            ) from error
    return True


def owner_of(port: int) -> str | None:
    """The process that listens on `port`, such as `redis-server (pid 812)`.

    None when that cannot be found out: another user's process, or not Linux.
    """
    inodes = _listening_inodes(port)
    for entry in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            opened = {_read_link(one) for one in (entry / "fd").iterdir()}
            if opened & inodes:
                name = (entry / "comm").read_text().strip()
                return f"{name} (pid {entry.name})"
        except OSError:  # it has ended, or is not ours to look at
            continue
    return None


def _read_link(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed meanwhile
        return ""


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
