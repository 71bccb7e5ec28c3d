"""Ports that stay free for a process of the test."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from jobs_lib.devstack.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def reserve_ports(count: int) -> Iterator[int]:
    """Keep so many ports in a row on 127.0.0.1, and give the first.

    A server may listen there. The kernel gives none of them to a client: the next port
    of a free one is soon that of a client, and stays taken for a minute afterwards.
    """
    while True:
        with contextlib.ExitStack() as kept:
            first = free_port()
            try:
                for port in range(first, first + count):
                    kept.enter_context(_keep(port))
            except OSError:
                continue
            yield first
            return


def _keep(port: int) -> socket.socket:
    """Hold a port without listening: this does not hinder a server on Linux."""
    one = socket.socket()
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
    except BaseException:
        one.close()
        raise
    return one
