"""Free ports on 127.0.0.1, and the processes on taken ones."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from jobs_lib.errors import DevStackError


def free_port() -> int:
    """A port that is free now. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket() as probe:
        # Servers set this option, too: connections in TIME_WAIT do not count.
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

    None when it is another user's process, or `psutil` is not installed.
    """
    try:
        import psutil
    except ModuleNotFoundError:  # the extra `devstack` installs it
        return None
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.pid and one.status == "LISTEN" and one.laddr.port == port:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    return None
