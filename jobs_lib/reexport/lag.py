"""Pause re-exports while a group that reads their topic is too far behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.kafka.lag import ask_lag
from jobs_lib.kafka.positions import Positions
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings

LOOK_SECONDS = 2.0
"""Between two looks: a fast re-export sends some ten thousand records meanwhile."""
IDLE_SECONDS = 10.0
"""Between two looks while there is none to be watched."""
_WITHIN = 6.0
"""Seconds: an older answer of Kafka changes nothing."""
_LAST_SECONDS = 1.0
"""Seconds that a stop waits: PostgreSQL may not answer."""


class LagWatch:
    """Looks every few seconds which groups are too far behind; a part of a relay.

    Each relay looks, and the table says what is paused. A group of which Kafka says
    nothing changes nothing. Kafka is asked only while a re-export is to be watched.

    Args:
        database: has the re-exports.
        settings: where Kafka is.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._positions: Positions | None = None
        # A look that outlasts the stop may make them yet.
        self._loop = Loop("re-export lag", self._work, ended=self._stop_asking)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread, and wait a moment for its look."""
        # It holds nothing that somebody waits for.
        self._loop.stop(_LAST_SECONDS)
        self._stop_asking()

    def _stop_asking(self) -> None:
        if self._positions is not None:
            self._positions.stop()

    def _work(self) -> Iterator[None]:
        stopping = self._loop.stopping
        while not stopping.is_set():
            with self._database.connect(self._loop.name, impatient=True) as connection:
                while watched := self._find_watched(connection):
                    for reexport, topic, group in watched:
                        self._steer(connection, reexport, topic, group)
                    yield
                    if stopping.wait(LOOK_SECONDS):
                        return
            yield
            # Hardly ever is one to be watched: until then it holds no connection.
            stopping.wait(IDLE_SECONDS)

    def _find_watched(
        self, connection: psycopg.Connection[Any]
    ) -> list[tuple[int, str, str]]:
        return connection.execute(self._database.queries["find_watched"]).fetchall()

    def _steer(
        self, connection: psycopg.Connection[Any], reexport: int, topic: str, group: str
    ) -> None:
        if self._positions is None:
            # Its clients need the name of a group: this one may be described anyway.
            positions = Positions(self._settings, group, interval=LOOK_SECONDS)
            positions.start()
            self._positions = positions
        lag = ask_lag(self._positions, topic, group, within=_WITHIN)
        if lag is None:
            return
        row = connection.execute(
            self._database.queries["steer_by_lag"],
            {"reexport": reexport, "group": group, "lag": lag},
        ).fetchone()
        if row is None or (row[1] == "paused") == (row[2] == "paused"):
            return
        entity, _, state, limit = row
        telemetry.emit(
            "reexport.paused" if state == "paused" else "reexport.resumed",
            entity=entity,
            group=group,
            lag=lag,
            limit=limit,
        )
