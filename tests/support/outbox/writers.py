"""Writers that roll back, commit late, and race."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.canary import VALUE

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from jobs_lib.outbox.topic import Topic

TABLE = "create table if not exists versions (key text primary key, n int not null)"
_NEXT = (
    "insert into versions values (%s, 1)"
    " on conflict (key) do update set n = versions.n + 1 returning n"
)


class Writers:
    """Threads that change entities, and write each change to two topics.

    Of ten transactions two roll back, and two commit late: rows with higher ids are
    committed before theirs. If the server goes away, the threads wait for it.
    """

    def __init__(
        self,
        url: str,
        states: Topic[Any],
        events: Topic[Any],
        *,
        seed: int,
        threads: int = 3,
        keys: int = 24,
        pause: float = 0.01,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """How many transactions ended in each way."""
        self._url = url
        self._states = states
        self._events = events
        self._keys = [f"k{n}" for n in range(keys)]
        self._pause = pause
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {n}"),))
            for n in range(threads)
        ]

    def __enter__(self) -> Self:
        with psycopg.connect(self._url) as connection:
            connection.execute(TABLE)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._url, connect_timeout=5) as connection:
                    while not self._stop.wait(chance.uniform(0, 2 * self._pause)):
                        self._write(connection, chance)
            except psycopg.Error:
                # Only the log shows whether that was committed.
                self._count("cut off")
                self._stop.wait(0.1)

    def _write(
        self, connection: psycopg.Connection[Any], chance: random.Random
    ) -> None:
        # The keys are sorted, so that no two writers wait for each other.
        for key in sorted(chance.sample(self._keys, chance.randint(1, 3))):
            self._change(connection, key, chance)
        if chance.random() < 0.2:
            self._events.send(connection, key=None, value={"at": chance.random()})
        if chance.random() < 0.5:
            # Such a key has no row of its own to lock: only the outbox orders its
            # records.
            key = f"bare-{chance.randrange(6)}"
            self._events.send(connection, key=key, value={"at": chance.random()})
        ending = chance.random()
        if ending < 0.2:
            connection.rollback()
            self._count("rolled back")
            return
        if ending < 0.4:
            self._stop.wait(chance.uniform(0.02, 0.2))
        connection.commit()
        self._count("committed")

    def _change(
        self, connection: psycopg.Connection[Any], key: str, chance: random.Random
    ) -> None:
        row = connection.execute(_NEXT, (key,)).fetchone()
        assert row is not None
        (version,) = row
        # No two values are alike: each one shows where it comes from.
        value = {"key": key, "n": version, "by": chance.getrandbits(64), "who": VALUE}
        if chance.random() < 0.1:
            self._states.tombstone(connection, key=key, version=version)
        else:
            self._states.send(connection, key=key, value=value, version=version)
        headers = (
            {"draw": f"{VALUE} {chance.random()}"} if chance.random() < 0.3 else None
        )
        self._events.send(
            connection, key=key, value=value, version=version, headers=headers
        )

    def _count(self, ending: str) -> None:
        with self._lock:
            self.counts[ending] += 1
