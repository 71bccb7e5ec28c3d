"""What ends a loop's sleep: another thread, or a hint of new work by NOTIFY."""

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
    from jobs_lib.db import Database


class Wakeup:
    """A sleep that other threads and the database can end.

    A NOTIFY is only a hint: it may be late or lost, and whoever sleeps looks by itself
    now and then. Without a connection to listen on there are simply no hints.

    Args:
        database: where hints come from.
        channel: they come on this one; None to hear none.
    """

    def __init__(self, database: Database, channel: str | None) -> None:
        self._database = database
        self._channel = channel
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._set = False
        self._connection: psycopg.Connection[Any] | None = None
        self._connecting = False
        self._closed = False
        self._failures = 0
        self._next_try = 0.0

    @property
    def hears(self) -> bool:
        """Whether the connection that hints come on is up, by all that is known."""
        return self._connection is not None

    def set(self) -> None:
        """End the sleep, from any thread."""
        if not self._set:
            self._set = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, b"x")

    def wait(self, seconds: float) -> list[str]:
        """Sleep until something happens; returns the hints as they were sent."""
        self._listen()
        waited: list[Any] = [self._reader]
        if self._connection is not None:
            waited.append(self._connection.fileno())
        ready, _, _ = select.select(waited, [], [], max(0.0, seconds))
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        # Cleared before the caller looks: what is set from here on ends the next sleep.
        # And cleared after the pipe: the byte of a set in between would be gone while
        # the flag stands, which keeps every other one from writing.
        self._set = False
        return self._take_hints() if len(ready) > (self._reader in ready) else []

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _listen(self) -> None:
        if self._channel is None or self._connection is not None or self._connecting:
            return
        if time.monotonic() >= self._next_try:
            self._connecting = True
            # A host that does not answer must hold up the hints alone, not the claims.
            threading.Thread(
                target=self._connect,
                args=(self._channel,),
                name="jobs_lib hints",
                daemon=True,
            ).start()

    def _connect(self, channel: str) -> None:
        try:
            connection = self._database.connect("hints", direct=True)
            connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        except Exception as error:
            self._fail(error)
        else:
            self._connection, self._failures = connection, 0
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
