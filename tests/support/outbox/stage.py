"""A stage for relays: two topics, processes that can be struck, and the verdict."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

# Each sender may have sent a block that it has not deleted yet.
from jobs_lib.outbox.relay import SENDERS
from tests.support.apps import count_unsent, make_app
from tests.support.outbox.history import Slot
from tests.support.outbox.judge import judge
from tests.support.pods import read_owners
from tests.support.records import read_topic
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support import Worker
    from tests.support.outbox.history import Row
    from tests.support.outbox.judge import Verdict


class Stage:
    """The relays of one database, the topics that they fill, and what was written.

    Args:
        url: the URL of the database.
        bootstrap_servers: the addresses of the broker.
        states: a topic whose rows are merged.
        events: a topic whose rows are not merged.
        run_process: the fixture of this name.
        partitions: how many partitions each topic has.
        settings: the settings of the relays.
    """

    def __init__(
        self,
        url: str,
        bootstrap_servers: str,
        states: str,
        events: str,
        run_process: Callable[..., Worker],
        *,
        partitions: int,
        **settings: Any,
    ) -> None:
        self.url = url
        self.bootstrap_servers = bootstrap_servers
        self.settings = {"relay_block": 20, **settings}
        self.app = make_app(
            url, kafka_bootstrap_servers=bootstrap_servers, **self.settings
        )
        self.states = self.app.topic(states, value=dict[str, Any], merge=True)
        self.events = self.app.topic(events, value=dict[str, Any])
        self.partitions = dict.fromkeys([states, events], partitions)
        self.relays: dict[str, Worker] = {}
        self.struck: Counter[str] = Counter()
        """How many faults there were, by their kind."""
        self.explained = 0
        """How many repeats they may have caused."""
        self._run_process = run_process
        self._slot = Slot(url)
        self._rows: list[Row] = []
        self._ended: list[Worker] = []

    def close(self) -> None:
        """End the relays, and drop the slot."""
        for worker in self.relays.values():
            worker.kill()
        self._slot.__exit__(None, None, None)

    # Relays

    def start_relay(
        self,
        pod: str,
        *,
        strikes: dict[str, str] | None = None,
        at_full: str = "SIGSTOP",
        **settings: Any,
    ) -> Worker:
        """Start a relay; tests.support.outbox.relay says what it prints.

        Args:
            pod: its name. It replaces an earlier relay of this name.
            strikes: from its start, which signal hits it at which point.
            at_full: the signal that hits it at ``full`` after SIGUSR2.
            settings: its own settings.
        """
        given = {
            **self.settings,
            "url": self.url,
            "kafka_bootstrap_servers": self.bootstrap_servers,
            "pod": pod,
            **settings,
            "topics": [*self.partitions],
            "merging": [self.states.name],
            "strikes": strikes or {},
            "at_full": at_full,
        }
        if before := self.relays.get(pod):
            self._ended.append(before)
        worker = self._run_process(
            "-m", "tests.support.outbox.relay", json.dumps(given)
        )
        self.relays[pod] = worker
        worker.wait_for_line("^started$")
        return worker

    def stop_relays(self) -> None:
        """Stop all relays in order: they end what they have begun."""
        for worker in self.relays.values():
            worker.signal(signal.SIGTERM)
        for worker in self.relays.values():
            assert worker.wait(timeout=60) == 0, worker.output

    def count_lines(self, pattern: str) -> int:
        """Count the lines that relays have written, also those that have ended."""
        wanted = re.compile(pattern)
        workers = [*self.relays.values(), *self._ended]
        return sum(
            bool(wanted.search(line)) for one in workers for line in list(one.lines)
        )

    def owners(self) -> dict[str, int]:
        """How many shards each pod has; empty while the server is away."""
        with contextlib.suppress(psycopg.OperationalError), self._connect() as admin:
            found = read_owners(admin, "relay")
            return {pod: len(shards) for pod, shards in found.items()}
        return {}

    def await_owners(self, *pods: str, timeout: float = 60.0) -> None:
        """Wait until these pods have all shards, and no other pod has any."""
        with self._connect() as admin:
            row = admin.execute("select shards from jobs_lib.installation").fetchone()
        assert row is not None
        wait_for(
            lambda: (
                {*(found := self.owners())} == {*pods} and sum(found.values()) == row[0]
            ),
            timeout=timeout,
            what=lambda: f"{pods} have all shards: {self.owners()}\n{self.output}",
        )

    @property
    def output(self) -> str:
        """The last lines of the relays, for messages."""
        parts = []
        for pod, worker in self.relays.items():
            told = find_crash(worker) or worker.errors[-20:]
            parts += [f"--- {pod}", *worker.lines[-20:], *told]
        return "\n".join(parts)

    @property
    def crashes(self) -> str:
        """The last lines of relays that ended by themselves."""
        workers = [*self.relays.values(), *self._ended]
        return "\n".join(line for one in workers for line in find_crash(one))

    # Faults

    def explain(self, kind: str, blocks: int) -> None:
        """Count a fault after which this many blocks may be sent again."""
        self.struck[kind] += 1
        self.explained += blocks * self.settings["relay_block"]

    def kill_at_once(self, pod: str) -> None:
        """SIGKILL a relay at any point, and start it again."""
        self.explain("kills", SENDERS)
        self.relays[pod].kill()
        self.start_relay(pod)

    def kill_after_send(self, pod: str) -> None:
        """SIGKILL a relay between the commit in Kafka and the delete."""
        self.explain("kills after the send", SENDERS)
        worker = self.relays[pod]
        worker.signal(signal.SIGUSR1)
        try:
            assert worker.wait(timeout=60) == -signal.SIGKILL, worker.output
        except pytest.fail.Exception:
            # The relay sends nothing: make it print where each of its threads stands.
            worker.signal(signal.SIGHUP)
            worker.wait(timeout=5)
        self.start_relay(pod)

    def pause(self, pod: str) -> None:
        """Stop a relay with a full queue until it is replaced, then let it go on."""
        self.explain("pauses", 2 * SENDERS)
        worker = self.relays[pod]
        before = count_struck(worker)
        worker.signal(signal.SIGUSR2)
        wait_for(
            lambda: count_struck(worker) > before,
            timeout=60,
            what=lambda: f"{pod} is struck\n{self.output}",
        )
        self.await_replaced(pod)
        # Before it goes on, others have sent what it had in its queue.
        self.await_left()
        worker.resume()

    def pause_until_fenced(self, *pods: str) -> None:
        """Pause one relay after another until the broker has refused one of them.

        A relay that stands still for longer than its records may wait gives them up
        itself, before the broker can refuse them. Then PostgreSQL says that another
        relay has its shard, or has ended its session: a take-over does so.
        """
        ended = "AdminShutdown|OperationalError: server closed the connection"
        noticed = f"^fenced by|^failed relay shard|^failed relay: ({ended})"
        for pod in pods:
            before = self.count_lines(noticed)
            self.pause(pod)
            self._await_lines(noticed, before, "a relay notices")
            if self.count_lines("^fenced by kafka"):
                return
            self.await_owners(*self.relays)
        pytest.fail(f"the broker has refused none of {pods}\n{self.output}")

    def await_replaced(self, pod: str) -> None:
        """Wait until other relays have the shards of this one."""

        def replaced() -> bool:
            owners = self.owners()
            return bool(owners) and pod not in owners

        wait_for(
            replaced,
            timeout=60,
            what=lambda: f"{pod} is replaced: {self.owners()}\n{self.output}",
        )

    def await_fenced(self, times: int = 0) -> None:
        """Wait until the broker has refused a relay more often than this."""
        self._await_lines("^fenced by kafka", times, "the broker refuses it")

    def _await_lines(self, pattern: str, more_than: int, what: str) -> None:
        wait_for(
            lambda: self.count_lines(pattern) > more_than,
            timeout=30,
            what=lambda: f"{what}\n{self.output}",
        )

    # The end

    def count_left(self) -> int:
        """Count the rows that wait or are held; -1 while the server is away."""
        with contextlib.suppress(psycopg.OperationalError), self._connect() as admin:
            return sum(count_unsent(admin))
        return -1

    def await_left(self, timeout: float = 60.0) -> None:
        """Wait until all rows that exist now have left."""
        with self._connect() as admin:
            row = admin.execute("select max(id) from jobs_lib.outbox").fetchone()
            wait_for(
                lambda: (
                    not admin.execute(
                        "select from jobs_lib.outbox where id <= %s limit 1", row
                    ).fetchall()
                ),
                timeout=timeout,
                what=lambda: f"what is there leaves\n{self.output}",
            )

    def await_empty(self, timeout: float = 60.0) -> None:
        """Wait until all rows have left."""
        wait_for(
            lambda: self.count_left() == 0,
            timeout=timeout,
            what=lambda: f"all is sent: {self.count_left()} left\n{self.output}",
        )

    def judge(self, *, repeats: int | None = None, timeout: float = 30.0) -> Verdict:
        """The verdict on all rows so far; by default with the repeats of its faults."""
        self._rows += self._slot.read()
        return judge(
            self._rows,
            {
                topic: read_topic(self.bootstrap_servers, topic, timeout=timeout)
                for topic in self.partitions
            },
            merging={self.states.name},
            partitions=self.partitions,
            block=self.settings["relay_block"],
            repeats=self.explained if repeats is None else repeats,
        )

    def trace(self, row_id: int) -> str:
        """Trace a row: in the log, in its relays' output, and in the topic."""
        told = [f"{row}" for row in self._rows if row.id == row_id]
        mention = re.compile(rf"rows=(?:.*,)?{row_id}(?:,|$)")
        for pod, worker in [*self.relays.items(), *(("-", one) for one in self._ended)]:
            lines = list(worker.lines)
            for n, line in enumerate(lines):
                if mention.search(line):
                    told += [f"{pod}: {around}" for around in lines[n : n + 4]]
        for topic in self.partitions:
            found = read_topic(
                self.bootstrap_servers,
                topic,
                timeout=600,
                isolation="read_uncommitted",
            )
            told += [
                f"uncommitted too: {record}"
                for record in found
                if record.headers.get("ce_id", "").startswith(f"{row_id}-")
            ]
        return "\n".join(told)

    def measure_outbox(self) -> int:
        """Measure the bytes of the outbox after its deleted rows have been vacuumed."""
        with self._connect() as admin:
            # By its own setting the table keeps its empty pages.
            admin.execute("vacuum (truncate) jobs_lib.outbox")
            query = "select pg_relation_size('jobs_lib.outbox')"
            row = admin.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, connect_timeout=5)


def find_crash(worker: Worker) -> list[str]:
    """The last lines of a relay from its crash on; none if it did not crash."""
    lines = list(worker.errors)
    starts = (n for n, line in enumerate(lines) if line.startswith("Fatal Python"))
    return lines[next(starts, len(lines)) :]


def count_struck(worker: Worker) -> int:
    """Count how often a relay was struck with a full queue."""
    return sum(line.startswith("struck full") for line in list(worker.lines))
