"""A group that does not answer costs only those who wait for it."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka import positions as module
from jobs_lib.kafka.positions import Positions
from jobs_lib.service.service import Service
from jobs_lib.settings import Settings
from tests.support.apps import heard, make_app
from tests.support.clock import Clock

GROUPS = ("a", "b", "c")
TIMEOUT = 5.0


class Coordinators:
    """Answers for groups; one of them is down, and takes the whole time."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down: str | None = None
        self.timeouts: list[float] = []
        """How long the one that is down was waited for, each time."""
        self._clock = clock
        monkeypatch.setattr(module, "make_consumer", self._make)

    def _make(self, settings: Settings, group: str, *_: Any, **__: Any) -> Mock:
        def committed(places: list[Any], timeout: float) -> list[Any]:
            if group != self.down:
                return [Mock(topic="t", partition=0, offset=10, error=None)]
            self.timeouts.append(timeout)
            self._clock.now += timeout
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

        return Mock(committed=committed, poll=Mock(return_value=None))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock by which answers are old."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def coordinators(clock, monkeypatch) -> Coordinators:
    """What Kafka says of groups."""
    return Coordinators(clock, monkeypatch)


@pytest.fixture
def positions(coordinators, monkeypatch) -> Positions:
    """A map without a thread."""
    made = Positions(Settings(kafka_bootstrap_servers="there:1"), timeout=TIMEOUT)
    found: Any = {"t": {0: True}}, []
    monkeypatch.setattr(made._kafka, "find_partitions", lambda topics: found)
    return made


def ask(positions: Positions, within: float) -> set[str]:
    """Ask for all groups; returns those of which a young answer is known."""
    return {
        one
        for one in GROUPS
        if positions.ask_committed(one, "t", within=within) is not None
    }


def answer(positions: Positions) -> None:
    """Ask Kafka once for what was asked for."""
    with positions._lock:
        asked, positions._asked = positions._asked, set()
    positions._answer(asked)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("K19")
@pytest.mark.parametrize("down", GROUPS)
def test_a_group_without_a_coordinator_makes_no_answer_of_the_others_old(
    positions, coordinators, clock, down
):
    others = {*GROUPS} - {down}
    seen: list[set[str]] = []
    positions.listen(lambda: seen.append(ask(positions, within=0.0)))
    coordinators.down = down
    ask(positions, within=0.0)
    with heard("loop.failed") as failed:
        answer(positions)
        # Each was young when it was told, wherever the one that is down was asked.
        assert set().union(*seen) == others
        for _ in range(3):
            began = clock.now
            answer(positions)
            # From now on it comes last, and the others' answers stay young.
            assert ask(positions, within=clock.now - began) == others
            assert clock.now - began <= 1.0
    assert {fields["loop"] for _, fields in failed} == {"positions"}
    assert coordinators.timeouts == [TIMEOUT, 1.0, 1.0, 1.0]
    coordinators.down = None
    answer(positions)
    assert ask(positions, within=0.0) == {*GROUPS}


@pytest.mark.expects("loop.failed")
def test_a_group_that_is_only_slow_gets_the_whole_time_now_and_then(
    positions, coordinators
):
    coordinators.down = "b"
    positions.listen(lambda: ask(positions, within=0.0))
    ask(positions, within=0.0)
    for _ in range(12):
        answer(positions)
    assert coordinators.timeouts == [TIMEOUT, *[1.0] * 9, TIMEOUT, 1.0]


def test_a_round_without_any_answer_is_told_and_fails(positions, coordinators):
    told: list[str] = []
    positions.listen(lambda: told.append("told"))
    coordinators.down = "b"
    positions.ask_committed("b", "t")
    with pytest.raises(UnavailableError):
        answer(positions)
    assert told == ["told"]


@pytest.mark.guarantee("K7")
@pytest.mark.parametrize("took", [0.0, 1.0, 2.0])
def test_a_gate_asks_kafka_again_after_one_refresh(coordinators, clock, took):
    app = make_app(
        "postgresql://there/db", gate_refresh=2.5, kafka_bootstrap_servers="there:1"
    )

    @app.consumer("t", group="own", after=[("t", "a")])
    def handle(record, conn) -> None: ...

    made = Service(app, ("consumers",))._make_dependencies("own")
    assert made is not None
    rounds: list[float] = []

    def find(topics: Any) -> Any:
        rounds.append(clock.now)
        clock.now += took
        return {"t": {0: True}}, []

    # A wait moves the clock.
    stops: Any = Mock(is_set=lambda: False)
    stops.wait = lambda seconds: setattr(clock, "now", clock.now + max(0.0, seconds))
    kafka: Any = made._kafka
    kafka.find_partitions, made._loop.stopping = find, stops
    # A gate asks for the next answer whenever one has come.
    made.listen(lambda: made.ask_committed("a", "t"))
    made.ask_committed("a", "t")
    work = made._work()
    for _ in range(6):
        next(work)
    assert [b - a for a, b in itertools.pairwise(rounds)] == [2.5] * 5
