"""Many members claim at once: each partition has one holder, and losers go on."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from jobs_lib.coordination.member import Member
from jobs_lib.coordination.messages import ClaimingPartition

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.coordination.messages import Shared

GROUP = "shop.mailer"
MEMBERS = 50
PARTITIONS = 16
INTERVAL = 30.0
"""Seconds: nobody becomes silent, however busy the machine is."""
WAIT = 120.0
Told = tuple[str, str, int]
"""What a listener was told: by which method, of which member, of which partition."""


class Racer:
    """A member and its listener, which notes what it is told in a list of all."""

    def __init__(self, settings, log: str, topic: str, name: str, told: list[Told]):
        self.name = name
        self.member = Member(
            settings,
            log=log,
            group=GROUP,
            client_id=name,
            topics=[topic],
            listener=self,
            interval=INTERVAL,
        )
        self.odd: list[object] = []
        """Holders in the log that were not this member when it was told to begin."""
        self._told = told

    def taken(self, shared: Shared, position: int | None) -> None:
        self._told.append(("taken", self.name, shared.partition))
        holding = self.member.log.find(shared).holding
        if holding is None or not holding.is_of(self.member.sender):
            self.odd.append(holding)

    def leave(self, shared: Shared) -> None:
        self._told.append(("leave", self.name, shared.partition))
        self.member.release(shared)

    def lost(self, shared: Shared) -> None:
        self._told.append(("lost", self.name, shared.partition))

    def ended(self, error: Exception) -> None:
        raise error

    def line_up(self, start: threading.Barrier) -> None:
        """Claim for the first time when all do, and begin with the first partition.

        It then reads nothing before all have sent their claims. Each thinks that it is
        one of sixteen members, and the first of them: so each wants one partition.
        """
        others = [f"other-{number:02}" for number in range(1, PARTITIONS)]
        calls: list[Callable[[float], int]] = [start.wait]

        def list_members() -> list[str]:
            if calls:
                calls.pop()(WAIT)
            return others

        vars(self.member._attendance)["list_members"] = list_members


def note_claims(log) -> dict[int, list[int]]:
    """The offsets of all claims of the log, by partition, valid or not."""
    claims: dict[int, list[int]] = defaultdict(list)
    real = log._places[0].fold

    def fold(offset, time_ms, partitions, said, own):
        outcome = real(offset, time_ms, partitions, said, own)
        if isinstance(said, ClaimingPartition):
            claims[said.shared.partition].append(offset)
        return outcome

    log._places[0].fold = fold
    return claims


@pytest.fixture
def race(settings, log_topic, topic):
    """A function that lets fifty members race: `race(log, told)`."""
    racers: list[Racer] = []

    def run(log: str, told: list[Told]) -> list[Racer]:
        data, start = topic(PARTITIONS), threading.Barrier(MEMBERS)
        # The names sort before those of the others.
        for number in range(MEMBERS):
            racers.append(Racer(settings, log, data, f"m-{number:02}", told))
            racers[-1].line_up(start)
        with ThreadPoolExecutor(MEMBERS) as pool:
            [*pool.map(lambda one: one.member.start(), racers)]
        return racers

    yield run
    with ThreadPoolExecutor(MEMBERS) as pool:
        [*pool.map(lambda one: one.member.stop(), racers)]


@pytest.mark.guarantee("FK18", "M8")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_fifty_members_that_race_for_sixteen_partitions_each_winner_is_alone(
    log_topic, open_log, race, wait_for
):
    log, told = log_topic(1), list[Told]()
    watching = open_log(log, "watch", only_reads=True)
    claims = note_claims(watching)
    racers = race(log, told)
    wait_for(lambda: len(told) >= PARTITIONS, timeout=WAIT, what="all are held")
    watching.read_to_end()
    for one in racers:
        one.member.log.read_to_end()
    # All have claimed the first one at once. Who lost went on to the next one.
    assert len(claims[0]) == MEMBERS
    assert sorted(partition for _, _, partition in told) == [*range(PARTITIONS)]
    assert {what for what, _, _ in told} == {"taken"}
    winners = {partition: name for _, name, partition in told}
    assert len({*winners.values()}) == PARTITIONS
    assert not any(one.odd for one in racers)
    with watching.lock:
        entries = watching.get_world(0).entries.items()
        found = {shared.partition: entry.holding for shared, entry in entries}
    assert {number: one.client_id for number, one in found.items()} == winners
    # The first claim in the log has won.
    assert {number: one.claim for number, one in found.items()} == {
        number: offsets[0] for number, offsets in claims.items()
    }
    held = [(one.name, part) for one in racers for part in one.member.list_held()]
    assert {(name, shared.partition) for name, shared in held} == {
        (name, number) for number, name in winners.items()
    }
    # One of those that have lost takes what a winner releases.
    gone = next(one for one in racers if one.name == winners[0])
    told.clear()
    gone.member.stop()
    wait_for(lambda: len(told) >= 2, timeout=WAIT, what="it is taken")
    (left, (what, heir, partition)) = told
    assert left == ("leave", gone.name, 0)
    assert (what, partition) == ("taken", 0)
    assert heir not in winners.values()
