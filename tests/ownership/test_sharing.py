"""Processes share origins by heartbeats, and leave followed ones to followers."""

from __future__ import annotations

import contextlib
from threading import Event
from typing import TYPE_CHECKING

import pytest

from jobs_lib.ownership import DatabaseSource, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.expects("fenced")

ORDERS = [f"orders/{n}" for n in range(20)]
OTHERS = [f"others/{n}" for n in range(20)]


@pytest.fixture
def start(database, wait_for):
    """A function that starts a process; it returns its source, and a way to stop it."""
    with contextlib.ExitStack() as running:

        def start(
            role: str = "execute",
            topics: tuple[str, ...] = (),
            passing: Callable[[], Iterable[str]] = lambda: (),
            is_cut_off: Callable[[], bool] = lambda: False,
        ):
            process = Process(database, "pod", [role], 0.1, topics=topics)
            source = DatabaseSource(
                database,
                process,
                role,
                lambda _: [*ORDERS, *OTHERS],
                lambda _: passing(),
                interval=0.02,
                stale_after=30.0,
                is_cut_off=is_cut_off,
            )
            process.start()
            stopping = running.enter_context(contextlib.ExitStack())
            stopping.callback(process.stop)
            source.start(lambda: None)
            stopping.callback(source.stop)
            return source, stopping.close

        yield start


def wants(source) -> set[str]:
    return {origin.partition("/")[0] for origin in source.wanted}


@pytest.mark.guarantee("S13")
def test_six_processes_share_the_origins_evenly(start, wait_for):
    sources = [start()[0] for _ in range(6)]
    wait_for(
        lambda: (
            sorted(len(source.wanted) for source in sources) == [6, 6, 7, 7, 7, 7]
            and {*ORDERS, *OTHERS} == {o for source in sources for o in source.wanted}
        ),
        what="they share evenly",
    )


@pytest.mark.guarantee("J20")
def test_a_process_wants_its_share_before_its_first_heartbeat_arrives(
    database, wait_for
):
    process = Process(database, "pod", ["execute"], 0.1)
    source = DatabaseSource(
        database,
        process,
        "execute",
        lambda _: ORDERS,
        interval=0.02,
        stale_after=30.0,
    )
    # After an outage it may look around before its first heartbeat has arrived.
    source.start(lambda: None)
    try:
        wait_for(lambda: source.wanted == {*ORDERS}, what="it wants its share")
    finally:
        source.stop()


def test_origins_that_come_and_go_move_no_other(start, wait_for):
    passing = ["gone/1"]
    one, _ = start(passing=passing.copy)
    other, _ = start(passing=passing.copy)

    def lasting(source: DatabaseSource) -> int:
        return len(source.wanted & {*ORDERS, *OTHERS})

    def share(count: int) -> tuple[frozenset[str], frozenset[str]]:
        wait_for(
            lambda: (
                len(one.wanted | other.wanted) == 40 + count
                and lasting(one) == lasting(other) == 20
                and not one.wanted & other.wanted
            ),
            what=f"{count} passing origins are shared",
        )
        return one.wanted, other.wanted

    few = share(1)
    passing[:] = [f"gone/{n}" for n in range(9)]
    many = share(9)
    assert few[0] <= many[0]
    assert few[1] <= many[1]


@pytest.mark.guarantee("FK8")
def test_origins_of_a_followed_topic_are_given_to_followers(start, wait_for):
    alone, _ = start()
    wait_for(lambda: alone.wanted == {*ORDERS, *OTHERS}, what="one has all")
    follower, stop_follower = start(topics=("orders",))
    wait_for(lambda: wants(alone) == {"others"}, what="the other gives them back")
    wait_for(lambda: follower.wanted >= {*ORDERS}, what="the follower has them all")
    second, _ = start(topics=("orders", "more"))
    wait_for(
        lambda: (
            (follower.wanted | second.wanted) >= {*ORDERS}
            and not follower.wanted & second.wanted
            and wants(second) == wants(follower) == {"orders", "others"}
        ),
        what="followers share them",
    )
    stop_follower()
    wait_for(lambda: second.wanted >= {*ORDERS}, what="the second has them all")
    assert wants(alone) == {"others"}


def test_relays_share_shards_whatever_topics_they_follow(start, wait_for):
    one, _ = start("relay", topics=("orders",))
    other, _ = start("relay")
    wait_for(
        lambda: wants(one) == wants(other) == {"orders", "others"},
        what="both have some of each",
    )


@pytest.mark.guarantee("J27")
def test_a_process_of_a_release_that_does_not_say_follows_nothing(
    start, admin, database, wait_for
):
    source, _ = start()
    wait_for(lambda: source.wanted == {*ORDERS, *OTHERS}, what="one has all")
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version)"
        " values (gen_random_uuid(), 'old', '{execute}', 'host', 1, '0.0.1')"
    )
    wait_for(lambda: 0 < len(source.wanted) < 40, what="it is one of two")


@pytest.mark.guarantee("FK7")
def test_a_cut_off_process_leaves_its_share_to_others_if_there_are_any(start, wait_for):
    cut_off = Event()
    cut_off.set()
    one, _ = start(is_cut_off=cut_off.is_set)
    wait_for(lambda: one.wanted == {*ORDERS, *OTHERS}, what="alone it goes on")
    other, stop_other = start()
    wait_for(lambda: not one.wanted, what="it has left")
    wait_for(lambda: other.wanted == {*ORDERS, *OTHERS}, what="the other has all")
    cut_off.clear()
    wait_for(
        lambda: one.wanted and not one.wanted & other.wanted,
        what="it has its share again",
    )
    cut_off.set()
    wait_for(lambda: not one.wanted, what="it has left once more")
    stop_other()
    wait_for(lambda: one.wanted == {*ORDERS, *OTHERS}, what="alone it takes them back")
