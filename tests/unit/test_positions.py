"""A group that does not answer costs only those who wait for it."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.kafka import position_clients
from jobs_lib.kafka import positions as module
from jobs_lib.kafka.positions import Positions
from jobs_lib.service.service import Service
from jobs_lib.settings import Settings
from tests.support.apps import heard, make_app
from tests.support.clock import Clock

GROUPS = ("a", "b", "c")
TIMEOUT = 5.0


class Coordinators:
    """Answers for groups; those that are down take the whole time."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down: set[str] = set()
        self.takes = 0.0
        """Seconds for each answer."""
        self.committed = 10
        """What each group has committed of the only partition."""
        self.end: int | None = 10
        """The end of the partition; None while nobody says it."""
        self.timeouts: list[float] = []
        """How long those that are down were waited for, each time."""
        self.clients: list[str] = []
        """The group of each client that was made."""
        self._clock = clock
        monkeypatch.setattr(position_clients, "make_consumer", self._make)

    def _make(self, settings: Settings, group: str, *_: Any, **__: Any) -> Mock:
        self.clients.append(group)

        def committed(places: list[Any], timeout: float) -> list[Any]:
            if group not in self.down and self.takes <= timeout:
                self._clock.now += self.takes
                return [say(self.committed)]
            self.timeouts.append(timeout)
            self._clock.now += timeout
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

        def offsets_for_times(places: list[Any], timeout: float) -> list[Any]:
            if self.end is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            self._clock.now += self.takes
            return [say(self.end)]

        return Mock(
            committed=committed,
            offsets_for_times=offsets_for_times,
            poll=Mock(return_value=None),
        )


def say(offset: int) -> Mock:
    """An offset of the partition, as a client gives it."""
    return Mock(topic="t", partition=0, offset=offset, error=None)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock by which answers are old."""
    clock = Clock()
    for one in (module, position_clients):
        monkeypatch.setattr(one, "time", clock)
    return clock


@pytest.fixture
def coordinators(clock, monkeypatch) -> Coordinators:
    """What Kafka says of groups."""
    return Coordinators(clock, monkeypatch)


@pytest.fixture
def positions(coordinators, monkeypatch) -> Positions:
    """A map without a thread."""
    made = Positions(Settings(kafka_bootstrap_servers="there:1"), timeout=TIMEOUT)
    found: Any = {"t": {0: True}}, {}
    monkeypatch.setattr(made._kafka, "find_partitions", lambda topics: found)
    return made


def ask(
    positions: Positions, within: float, groups: tuple[str, ...] = GROUPS
) -> set[str]:
    """Ask for all groups; returns those of which a young answer is known."""
    return {
        one
        for one in groups
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
    coordinators.down = {down}
    ask(positions, within=0.0)
    with heard("loop.failed") as failed:
        answer(positions)
        # Each was young when it was told, wherever the one that is down was asked.
        assert set().union(*seen) == others
        positions._answer_apart()
        for _ in range(3):
            began = clock.now
            answer(positions)
            # From now on nobody waits for it.
            assert ask(positions, within=0.0) == others
            assert clock.now == began
            positions._answer_apart()
    assert {fields["loop"] for _, fields in failed} == {"positions"}
    assert coordinators.timeouts == [1.0, TIMEOUT, 1.0, 1.0, 1.0]
    coordinators.down = set()
    answer(positions)
    positions._answer_apart()
    assert ask(positions, within=0.0) == {*GROUPS}
    # It is asked with the others again.
    answer(positions)
    assert positions._left == {}


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("K7", "K19")
def test_however_many_groups_are_silent_the_others_answers_stay_young(
    positions, coordinators, clock
):
    groups = ("a", "b", "c", "d", "e")
    coordinators.down = {"a", "b", "d", "e"}
    positions.listen(lambda: ask(positions, 0.0, groups))
    ask(positions, 0.0, groups)
    began = clock.now
    answer(positions)
    # All of them died just now: that costs the others little, and only once.
    assert clock.now - began <= 1.5
    for _ in range(3):
        began = clock.now
        answer(positions)
        assert ask(positions, 0.0, groups) == {"c"}
        assert clock.now == began
        positions._answer_apart()
    # Nor does it matter who is silent for how long: there are two clients of each.
    assert sorted(coordinators.clients) == sorted([*"abde"] * 2 + ["c"])
    coordinators.down = set()
    answer(positions)
    positions._answer_apart()
    assert ask(positions, 0.0, groups) == {*groups}


@pytest.mark.expects("loop.failed")
def test_a_group_that_is_only_slow_gets_the_whole_time_now_and_then(
    positions, coordinators
):
    coordinators.down = {"b"}
    positions.listen(lambda: ask(positions, within=0.0))
    ask(positions, within=0.0)
    for _ in range(12):
        answer(positions)
        positions._answer_apart()
    assert coordinators.timeouts == [1.0, TIMEOUT, *[1.0] * 9, TIMEOUT, 1.0]


def test_a_group_that_is_slow_is_asked_apart_for_as_long_as_it_is_slow(
    positions, coordinators
):
    coordinators.takes = 2.0
    positions.ask_committed("b", "t")
    answer(positions)
    for takes, is_apart in ((2.0, True), (2.0, True), (0.5, False)):
        coordinators.takes = takes
        positions.ask_committed("b", "t")
        answer(positions)
        positions._answer_apart()
        assert positions.ask_committed("b", "t", within=takes) is not None
        assert bool(positions._apart) is is_apart
    # Nobody was told of a failure, and the first thread has waited once.
    assert coordinators.timeouts == [1.0]


@pytest.mark.expects("loop.failed")
def test_a_round_without_any_answer_is_told_and_fails(positions, coordinators):
    told: list[str] = []
    positions.listen(lambda: told.append("told"))
    coordinators.down = {"b"}
    positions.ask_committed("b", "t")
    with heard("loop.failed") as failed:
        answer(positions)
        assert told == ["told"]
        positions._answer_apart()
    ((_, fields),) = failed
    assert fields["error"].startswith("UnavailableError: ")


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("K3")
def test_the_offset_of_a_topic_that_was_made_anew_counts_no_more(
    positions, coordinators
):
    told: list[Any] = []
    coordinators.takes = 0.1

    def ask_handled() -> Any:
        found = positions.ask_handled("a", "t")
        return found and (dict(found.offsets), dict(found.above))

    positions.listen(lambda: told.append(ask_handled()))
    positions._kafka.ids = {"t": UUID(int=1)}
    assert ask_handled() is None
    answer(positions)
    # Nothing is known before the end is.
    assert told == [None, ({0: 10}, {})]
    coordinators.committed = coordinators.end = 12
    answer(positions)
    assert told[2:] == [({0: 10}, {}), ({0: 12}, {})]
    # Whoever is not told an end has known a higher one.
    coordinators.committed, coordinators.end = 11, None
    answer(positions)
    positions._answer_apart()
    assert told[-1] == ({0: 11}, {})
    positions._kafka.ids = {"t": UUID(int=2)}
    answer(positions)
    assert told[-1] is None
    coordinators.end = 3
    positions._answer_apart()
    assert told[-1] == ({}, {0: 11})
    answer(positions)
    assert ({0: 11}, {}) not in told[-2:]
    coordinators.committed = 2
    answer(positions)
    assert told[-1] == ({0: 2}, {})


@pytest.mark.guarantee("K3", "K18")
def test_what_a_group_has_handled_counts_for_as_long_as_its_answer_is_young(
    positions, clock
):
    positions._kafka.ids = {"t": UUID(int=1)}
    positions.ask_handled("a", "t")
    answer(positions)

    def is_known() -> bool:
        return positions.ask_handled("a", "t", within=3.0) is not None

    clock.now += 2.9
    assert is_known()
    clock.now += 0.2
    assert not is_known()
    answer(positions)
    assert is_known()


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
        return {"t": {0: True}}, {}

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
