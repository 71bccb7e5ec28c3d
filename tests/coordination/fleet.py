"""Members as processes that are killed, stand still, end, or have a wrong clock."""

from __future__ import annotations

import json
import threading
from collections import Counter
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

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

    from jobs_lib.coordination.log import Log
    from tests.coordination.checker import Run
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
        # The signal may come before it has begun.
        was_early = code == -SIGTERM and not self._ended[-1].batches
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
) -> list[str]:
    """Name what is wrong about a run of members with the settings above.

    With clocks it is judged, too, when they have processed what.
    """
    history = replay(read_log(servers, log))
    late = [] if clocks is None else judge_times(history, runs, topic, clocks)
    if delivery == "at_most_once":
        return [*late, *judge_at_most_once(history, runs, topic, ends)]
    most = count_repeats(BATCH, INTERVAL, SECONDS)
    return [*late, *judge_at_least_once(history, runs, topic, ends, most)]
