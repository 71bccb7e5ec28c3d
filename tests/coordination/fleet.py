"""Members as processes that are killed, stand still, end, or have a wrong clock."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter, defaultdict
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.messages import Probe, Sender, Snapshot, decode
from jobs_lib.coordination.verification import Result, verify
from jobs_lib.settings import Settings
from tests.coordination.checker import (
    count_repeats,
    judge_at_least_once,
    judge_at_most_once,
    replay,
)
from tests.coordination.journals import read_log, read_run
from tests.coordination.overlaps import judge_times
from tests.support.clock import set_faketime

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from tests.coordination.checker import Places, Run
    from tests.coordination.overlaps import Clocks
    from tests.support.worker import Worker

GROUP = "shop.mailer"
INTERVAL = 0.5
BATCH = 10
SECONDS = 0.05
"""That the handler takes for a batch."""
BOTH = pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
_FLUSH_SECONDS = 60.0
_LARGEST_SHIFT = 86_400
_ASKER = "asker"


class Fleet:
    """Members of a group by name: each is at work, stands still, or is gone.

    Args:
        run_process: the fixture.
        chance: chooses what happens.
        folder: where it stands by how much each process's time of day is wrong.
        given: what each process is given, see `tests.support.coordinated`.
        find_env: finds the environment in which a process's time of day is that of the
            file; Python's alone is, without it.
    """

    def __init__(
        self,
        run_process: Callable[..., Worker],
        chance: random.Random,
        folder: Path,
        given: dict[str, Any],
        find_env: Callable[[Path], dict[str, str]] = lambda _: {},
    ) -> None:
        self.told: list[str] = []
        """What has happened, for messages."""
        self._run_process = run_process
        self._chance = chance
        self._folder = folder
        self._given = given
        self._find_env = find_env
        self._workers: dict[str, Worker] = {}
        self._still: set[str] = set()
        self._replaced: list[tuple[str, Worker]] = []
        """Processes that stand still beside a later one of their name."""
        self._gone: set[str] = set()
        self._ended: list[Run] = []

    def start(self, name: str) -> None:
        """Start a member, whose time of day is wrong."""
        self._set_clock(name)
        given = {"client_id": name, "clock": str(self._folder / name)}
        module = "tests.support.coordinated"
        self._workers[name] = self._run_process(
            "-m",
            module,
            json.dumps(self._given | given),
            env=self._find_env(self._folder / name),
        )
        self._gone.discard(name)

    def shift(self) -> None:
        """Let the time of day of all leap, each by its own."""
        for name in self._workers:
            self._set_clock(name)

    def disturb(self) -> None:
        """Let something happen to one of them."""
        name = self._chance.choice(sorted([*self._workers, *self._gone]))
        if name in self._gone:
            self._do("start", name)
        elif name in self._still:
            self._do(self._chance.choice(["wake", "wake", "replace"]), name)
        elif self._is_at_risk():
            self._set_clock(name)
        else:
            acts = ["kill", "kill and start", "end", "shift"]
            # One that stands still while it starts gets no answer in time, and ends
            # with that error.
            if self._has_begun(name):
                acts += ["stall", "stall"]
            self._do(self._chance.choice(acts), name)

    def restore(self) -> None:
        """Let all be at work."""
        for name in sorted(self._still):
            self._do("wake", name)
        for name, worker in self._replaced:
            self.told.append(f"wake the one before {name}")
            worker.resume()
        for name in sorted(self._gone):
            self._do("start", name)

    def end(self) -> None:
        """End all in order."""
        replaced = [worker for _, worker in self._replaced]
        for worker in [*self._workers.values(), *replaced]:
            worker.signal(SIGTERM)
        for name in sorted(self._workers):
            self._retire(name)
        for name, worker in self._replaced:
            code = worker.wait()
            self._ended.append(read_run(worker, name, may_lose=True))
            was_early = code == -SIGTERM and not self._ended[-1].batches
            was_replaced = "has taken its partitions over" in worker.output
            assert code == 0 or was_early or was_replaced, worker.output

    def list_runs(self) -> list[Run]:
        """What each process has processed that has ended."""
        return self._ended

    def describe(self) -> str:
        """What has happened, and what the processes have written last."""
        tails = [
            f"{name}: {[*worker.lines[-5:], *worker.errors[-5:]]}"
            for name, worker in self._workers.items()
        ]
        return "\n".join([*self.told, *tails])

    def _do(self, act: str, name: str) -> None:
        self.told.append(f"{act} {name}")
        if act == "start":
            self.start(name)
        elif act == "wake":
            self._workers[name].resume()
            self._still.discard(name)
        elif act == "stall":
            self._workers[name].pause()
            self._still.add(name)
        elif act == "replace":
            self._replaced.append((name, self._workers.pop(name)))
            self._still.discard(name)
            self.start(name)
        elif act == "shift":
            self._set_clock(name)
        elif act == "end":
            self._workers[name].signal(SIGTERM)
            self._retire(name)
        else:
            self._workers[name].kill()
            self._note(name, may_lose=True)
            if act == "kill and start":
                self.start(name)

    def _retire(self, name: str) -> None:
        """Note a process that ends in order."""
        worker = self._workers[name]
        code = worker.wait()
        # One that it has replaced may have woken right after it had begun, or together
        # with it, and have taken what it had let go stale.
        is_second = name in {one for one, _ in self._replaced}
        self._note(name, may_lose=is_second)
        # The signal may come before it has begun. And where all start or wake at once,
        # a busy broker may not answer one of them in time: it ends, and says so.
        was_early = not self._ended[-1].batches and (
            code == -SIGTERM or "no Kafka broker at" in worker.output
        )
        was_refused = is_second and (
            "is at work in the group" in worker.output
            or "has taken its partitions over" in worker.output
        )
        assert code == 0 or was_early or was_refused, worker.output

    def _note(self, name: str, *, may_lose: bool) -> None:
        self._ended.append(read_run(self._workers.pop(name), name, may_lose=may_lose))
        self._gone.add(name)

    def _has_begun(self, name: str) -> bool:
        return any(one.startswith("taken") for one in list(self._workers[name].lines))

    def _is_at_risk(self) -> bool:
        """Whether too few are at work: time must pass in the log."""
        return len(self._workers) - len(self._still) <= 2

    def _set_clock(self, name: str) -> None:
        shift = self._chance.randint(-_LARGEST_SHIFT, _LARGEST_SHIFT)
        set_faketime(self._folder / name, shift)


def find_owners(log: Log) -> dict[int, str]:
    """The client that holds each partition, once its claim is confirmed."""
    with log.lock:
        return {
            shared.partition: entry.holding.client_id
            for world in log.get_worlds()
            for shared, entry in world.entries.items()
            if entry.holding is not None and entry.holding.confirmed
        }


def read_time(log: Log) -> int:
    """The time of a log: the latest of its partitions'."""
    with log.lock:
        return max(world.now_ms for world in log.get_worlds())


class Feed:
    """Writes records to the partitions of a topic, in bursts, until it is stopped."""

    def __init__(
        self,
        servers: str,
        topic: str,
        partitions: int,
        chance: random.Random,
        burst: int = 40,
        every: float = 0.1,
    ) -> None:
        self.counts: Counter[int] = Counter()
        """How many records each partition has."""
        self._producer = Producer(
            # No record comes twice when a broker fails.
            {"bootstrap.servers": servers, "enable.idempotence": True}
        )
        self._topic = topic
        self._partitions = partitions
        self._chance = chance
        self._burst = burst
        self._every = every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Write no more, and wait until Kafka has all."""
        self._stopping.set()
        self._thread.join()
        assert not self._producer.flush(_FLUSH_SECONDS)

    def _write(self) -> None:
        while not self._stopping.wait(self._every):
            partition = self._chance.randrange(self._partitions)
            for _ in range(self._burst):
                self._producer.produce(self._topic, b"x", partition=partition)
            self.counts[partition] += self._burst
            self._producer.poll(0)


def judge(
    servers: str,
    log: str,
    delivery: str,
    runs: list[Run],
    topic: str,
    ends: dict[int, int],
    clocks: Clocks | None = None,
    *,
    needs_states: bool = False,
) -> list[str]:
    """Name what is wrong about a run of members with the settings above.

    With clocks it is judged, too, when they have processed what. If states are needed,
    the members must have written one of each partition of the log.
    """
    places = read_log(servers, log)
    settings = Settings(kafka_bootstrap_servers=servers)
    faults = judge_states(settings, log, places, needs_all=needs_states)
    history = replay(places)
    if clocks is not None:
        faults += judge_times(history, runs, topic, clocks)
    if delivery == "at_most_once":
        return [*faults, *judge_at_most_once(history, runs, topic, ends)]
    most = count_repeats(BATCH, INTERVAL, SECONDS)
    return [*faults, *judge_at_least_once(history, runs, topic, ends, most)]


def ask_for_states(settings: Settings, log: str) -> None:
    """Let all members that are at work write their states at one offset of each place.

    A snapshot is such a state. Each of them writes one when it meets this probe.
    """
    # It is in no group: else the members would leave it a share.
    sender = Sender("shop.asker", _ASKER, uuid.uuid4().hex)
    with Log(settings, log, sender) as asking:
        probe = Probe(sender, wants_snapshot=True)
        for one in [asking.send(probe, place=n) for n in range(asking.partitions)]:
            one.wait(_FLUSH_SECONDS)


def read_states(places: Places) -> dict[tuple[int, int], dict[str, str]]:
    """The digests of the states that members have written down.

    They are found by place and offset, and then by the run that has written each.
    """
    found: defaultdict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for place, records in places.items():
        for _, _, value in records:
            read = decode(value) if value and b'"Snapshot"' in value else None
            said = read[1] if isinstance(read, tuple) else None
            if isinstance(said, Snapshot) and said.sender.client_id != _ASKER:
                found[place, said.as_of][said.sender.instance_id] = said.digest
    return found


def judge_states(
    settings: Settings, log: str, places: Places, *, needs_all: bool
) -> list[str]:
    """Name states that differ from each other, or from the log, at an equal offset."""
    faults = [
        f"members state several worlds of the log's partition {place} at {as_of}: {one}"
        for (place, as_of), one in read_states(places).items()
        if len({*one.values()}) > 1
    ]
    right = {Result.SAME} if needs_all else {*Result} - {Result.DIFFERS}
    found = verify(settings, log)
    return faults + [f"the log says: {one}" for one in found if one.result not in right]
