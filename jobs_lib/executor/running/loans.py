"""Connections lent to jobs with a time limit, which end when the time is over.

Python cannot end a thread. One that hangs inside its job's transaction keeps the locks
of that transaction, for which the next attempt would wait, and a connection of the
pool. So its connection is ended from outside.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.executor.lane import ClaimedJob

_CANCEL_WITHIN = 5.0
"""Seconds that the server has to take a request to cancel a statement."""


class Loans:
    """The connections of running jobs with a time limit; for many threads."""

    def __init__(
        self,
        resize: Callable[[int], object] = lambda lost: None,
        resize_async: Callable[[int], object] = lambda lost: None,
    ) -> None:
        """Lend nothing yet.

        Args:
            resize: lets the pool have so many connections more than usual, in place of
                those that handlers keep whose time is over.
            resize_async: the same for the event loop's pool.
        """
        self._lock = threading.Lock()
        self._open: dict[ClaimedJob, _Loan] = {}
        self._over: set[ClaimedJob] = set()
        """Jobs that were given up, and whose handlers go on."""
        self._lost = {False: 0, True: 0}
        """The connections that handlers keep though they were ended: plain and async
        ones."""
        self._resize = {False: resize, True: resize_async}

    def add(self, job: ClaimedJob, connection: Any) -> bool:
        """Note a connection that a job gets; False if the job was given up."""
        with self._lock:
            if job in self._over:
                return False
            self._open[job] = _Loan(connection)
            return True

    def remove(self, job: ClaimedJob) -> bool:
        """The job leaves its transaction; False if its connection was ended."""
        with self._lock:
            loan = self._open.pop(job, None)
        if loan is not None:
            loan.close()
        return loan is not None

    def note_returned(self, connection: Any) -> None:
        """The pool has a connection back that was ended."""
        with self._lock:
            self._count(connection, -1)

    def give_up(self, job: ClaimedJob) -> None:
        """The job's time is over, and its handler goes on: end its connection."""
        with self._lock:
            self._over.add(job)
            loan = self._open.pop(job, None)
            if loan is not None:
                self._count(loan.connection, 1)
        if loan is not None:
            # Not here: the server may be silent, and this thread watches other jobs.
            threading.Thread(
                target=loan.end, name="jobs_lib time limit", daemon=True
            ).start()

    def forget(self, job: ClaimedJob) -> None:
        """The handler of a job that was given up has ended."""
        with self._lock:
            self._over.discard(job)

    def _count(self, connection: Any, by: int) -> None:
        is_async = isinstance(connection, psycopg.AsyncConnection)
        self._lost[is_async] += by
        self._resize[is_async](self._lost[is_async])


class _Loan:
    """A lent connection; only one thread may end or close it."""

    __slots__ = ("_socket", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        # A number of its own: the driver may close its socket at any moment, and the
        # number then soon stands for another one.
        self._socket = os.dup(connection.pgconn.socket)

    def close(self) -> None:
        """Leave the connection alone."""
        os.close(self._socket)

    def end(self) -> None:
        """Cancel what runs, and cut the connection, so that the server rolls back.

        The driver's own state is left to the thread that uses it. It gets an error.
        """
        with socket.socket(fileno=self._socket) as end:
            # A server that runs a statement does not notice that its client is gone.
            with suppress(Exception):
                self._cancel()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cancel(self) -> None:
        cancelling = self.connection.cancel_safe(timeout=_CANCEL_WITHIN)
        if asyncio.iscoroutine(cancelling):
            # On a loop of its own: the handler's may be blocked.
            asyncio.run(cancelling)
