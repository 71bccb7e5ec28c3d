"""A loop's sleep, which another thread or a hint of new work (NOTIFY) can end."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT

if TYPE_CHECKING:
    from jobs_lib.postgres.database import Database


class Wakeup:
    """A sleep that other threads and the database can end.

    A NOTIFY is only a hint: it may be late or lost, so the sleeping loop also polls now
    and then. Without a connection to listen on there are no hints.

    Args:
        database: sends the hints.
        channel: to listen on; None to listen to none.
    """

    def __init__(self, database: Database, channel: str | None) -> None:
        self._database = database
        self._channel = channel
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._set = False
        self._closing = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._connecting = False
        self._closed = False
        self.turns = 0
        """How often the connection for hints has come up or broken off."""
        self._failures = 0
        self._next_try = 0.0

    @property
    def receives_hints(self) -> bool:
        """Whether the connection for hints is up, as far as is known."""
        return self._connection is not None

    def set(self) -> None:
        """End the sleep, from any thread."""
        if not self._set:
            self._set = True
            with self._closing, contextlib.suppress(BlockingIOError):
                if not self._closed:
                    os.write(self._writer, b"x")

    def wait(self, seconds: float) -> list[str]:
        """Sleep until something happens; return the hints as they were sent."""
        self._listen()
        # Not select(), which handles only the first 1,024 descriptors of a process.
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1_000)}
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        # Cleared before the caller looks: a set() from here on ends the next sleep.
        # And cleared after the pipe was read: otherwise a set() in between would lose
        # its byte and keep the flag, and no later set() would write.
        self._set = False
        return self._take_hints() if ready - {self._reader} else []

    def close(self) -> None:
        """Stop listening for good; called by the thread that sleeps."""
        with self._closing:
            self._closed = True
            os.close(self._reader)
            os.close(self._writer)
        self._hang_up()

    def _hang_up(self) -> None:
        # The thread that has just connected may do this at the same time.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self.turns += 1

    def _listen(self) -> None:
        if self._channel is None or self._connection is not None or self._connecting:
            return
        if time.monotonic() >= self._next_try:
            self._connecting = True
            # In a thread: a host that does not answer must delay hints, not claims.
            thread = threading.Thread(
                target=self._connect,
                args=(self._channel,),
                name="jobs_lib hints",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                # The process may have no more threads for a while.
                self._connecting = False
                self._fail(error)

    def _connect(self, channel: str) -> None:
        try:
            connection = self._database.connect("hints", direct=True, impatient=True)
            connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        except Exception as error:
            # After close() nobody waits for hints, and the server may be stopping too.
            if not self._closed:
                self._fail(error)
        else:
            self._connection, self._failures = connection, 0
            self.turns += 1
            if self._closed:
                self._hang_up()
        finally:
            self._connecting = False
            self.set()

    def _take_hints(self) -> list[str]:
        assert self._connection is not None
        hints = []
        try:
            pgconn = self._connection.pgconn
            pgconn.consume_input()
            while notification := pgconn.notifies():
                hints.append(notification.extra.decode())
        except psycopg.Error as error:
            self._hang_up()
            self._fail(error)
        return hints

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        telemetry.emit("loop.failed", loop="hints", error=error)
        self._next_try = time.monotonic() + RECONNECT.delay(self._failures)
