"""The connection of Python's Spark to its Java."""

from __future__ import annotations

from typing import Any


def drop_connection(session: Any) -> None:
    """Let this thread's next call of Java open a connection of its own.

    The answer to a call that was broken off is still to come on the former one. The
    next call would take it for its own, and so would each one after it.
    """
    client = session.sparkContext._gateway._gateway_client
    if (connection := client.get_thread_connection()) is not None:
        connection.close()
