"""Origins are taken and released as the database decides, through every failure."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from jobs_lib.ownership import Ownership, Process, Source
from tests.support.apps import count, heard
from tests.support.clock import Clock

HANDOVER = 1.5
FAIL_RELEASES = """
create function fail() returns trigger language plpgsql as $$
begin
    if new.owner is null then raise exception 'made to fail'; end if;
    return new;
end $$;
create trigger fail before update on jobs_lib.origins
for each row execute function fail()
"""


class Recorder:
    """A holder that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[str]]] = []
        self.epochs: dict[str, int] = {}
        self.timeouts: list[float] = []
        """How long each release may wait for running jobs."""

    def lose(self, origins):
        self.calls.append(("lose", frozenset(origins)))

    def hurry(self, jobs):
        self.calls.append(("hurry", frozenset(jobs)))

    def take(self, origins):
        self.epochs |= origins
        self.calls.append(("take", frozenset(origins)))

    def release(self, origins, timeout):
        self.timeouts.append(timeout)
        self.calls.append(("release", origins))


@pytest.fixture
def holder():
    return Recorder()


@pytest.fixture
def own(database, holder):
    """Start an ownership over a source; stop it at the end."""
    started: list[Ownership | Process] = []

    def start(
        source: Source,
        *,
        interval: float = 0.05,
        stale_after: float = 5.0,
        was_away: bool = False,
    ) -> Ownership:
        process = Process(database, "pod", ["execute"], 0.2, stale_after=stale_after)
        if was_away:
            process.doubt()
        ownership = Ownership(
            database,
            process,
            "execute",
            source,
            holder,
            interval=interval,
            stale_after=stale_after,
            handover_timeout=HANDOVER,
            jobs=holder,
        )
        process.start()
        ownership.start()
        started.extend([ownership, process])
        return ownership

    yield start
    for one in started:
        one.stop()


def owners(connection):
    query = "select origin, epoch from jobs_lib.origins where owner is not null"
    return dict(connection.execute(query).fetchall())


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("again", [True, False], ids=["wanted again", "not wanted"])
def test_a_failed_release_is_repeated_until_the_row_is_free(
    own, holder, connect, wait_for, again
):
    admin = connect(autocommit=True)
    source = Source()
    own(source)
    source.assign(["t/1", "t/2"])
    wait_for(lambda: owners(admin) == {"t/1": 1, "t/2": 1}, what="both are taken")
    admin.execute(FAIL_RELEASES)
    source.revoke(["t/1"])
    gone = ("release", frozenset({"t/1"}))
    wait_for(lambda: gone in holder.calls, what="the holder has let go")
    if again:
        source.assign(["t/1"])
        # The holder works on it again, under a new epoch.
        wait_for(lambda: owners(admin) == {"t/1": 2, "t/2": 1}, what="it is taken")
        taken = ("take", frozenset({"t/1"}))
        wait_for(lambda: holder.calls[-1] == taken, what="the holder has it")
    admin.execute("drop trigger fail on jobs_lib.origins")
    source.revoke(["t/1"])
    wait_for(lambda: owners(admin) == {"t/2": 1}, what="the row is free")
    # The holder was called once each time: the first call handed the jobs over.
    assert holder.calls.count(gone) == 1 + again


@pytest.mark.expects("loop.failed")
def test_a_release_that_fails_at_the_end_is_told(own, connect, wait_for):
    admin = connect(autocommit=True)
    source = Source()
    # After the end nobody tries again.
    ownership = own(source, interval=600.0)
    source.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 1}, what="it is taken")
    admin.execute(FAIL_RELEASES)
    with heard("loop.failed") as failed:
        ownership.stop()
    ((_, fields),) = failed
    assert fields["loop"] == "own execute"
    assert "made to fail" in str(fields["error"])
    assert ownership.owned == {}


@pytest.mark.expects("loop.failed")
def test_what_a_lost_connection_has_delayed_is_done_as_soon_as_there_is_a_new_one(
    own, admin, wait_for
):
    source = Source()
    own(source, interval=600.0)
    source.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 1}, what="it is taken")
    admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'jobs_lib own %' and datname = current_database()"
    )
    source.revoke(["t/1"])
    wait_for(lambda: owners(admin) == {}, timeout=30, what="it is free")


def test_jobs_of_a_released_origin_may_finish_and_those_of_a_lost_one_may_not(
    own, holder, connect, wait_for
):
    admin = connect(autocommit=True)
    source = Source()
    own(source)
    source.assign(["t/1", "t/2"])
    wait_for(lambda: owners(admin).keys() == {"t/1", "t/2"}, what="both are taken")
    source.revoke(["t/1"])
    wait_for(lambda: holder.timeouts == [HANDOVER], what="one is given up")
    with heard("origins.lost") as lost:
        admin.execute("update jobs_lib.origins set epoch = epoch + 1")
        wait_for(lambda: holder.timeouts == [HANDOVER, 0], what="the other is lost")
    assert [fields["origins"] for _, fields in lost] == [["t/2"]]


def test_a_process_that_has_left_takes_nothing_and_reports_no_loss(
    own, connect, wait_for
):
    admin = connect(autocommit=True)
    source = Source()
    ownership = own(source)
    source.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 1}, what="it is taken")
    with heard("origins.lost") as lost:
        ownership._process.abandon(30)
        # When the second round has begun, the first one has ended.
        for _ in range(2):
            source.assign(["t/2"])
            wait_for(lambda: not ownership._changed.is_set(), what="a round begins")
        ownership.stop()
    assert owners(admin) == {}
    assert not lost


def test_a_heartbeat_under_way_does_not_bring_back_a_process_that_leaves(
    database, admin, monkeypatch
):
    process = Process(database, "pod", ["execute"], 0.05)
    process.start()
    asked, go_on = threading.Event(), threading.Event()

    def report() -> list[dict[str, Any]]:
        asked.set()
        go_on.wait(60)
        return []

    stop = process._loop.stop

    def end(timeout: float | None = None) -> None:
        go_on.set()
        stop(timeout)

    monkeypatch.setattr(process._loop, "stop", end)
    process.report = report
    assert asked.wait(60)
    process.abandon(60)
    end()
    assert count(admin, "processes") == 0


@pytest.mark.expects("origins.lost")
@pytest.mark.guarantee("FP7", "I11")
def test_an_owner_never_has_an_epoch_twice_even_if_the_database_forgets_one(
    own, holder, connect, wait_for
):
    admin = connect(autocommit=True)
    source = Source()
    own(source)
    source.assign(["t/1"])
    wait_for(lambda: holder.epochs == {"t/1": 1}, what="it is taken")
    # A standby that lacks the last commits has this state.
    admin.execute("update jobs_lib.origins set epoch = 0, owner = null")
    wait_for(lambda: holder.epochs == {"t/1": 2}, what="it is taken anew")
    assert owners(admin) == {"t/1": 2}


@pytest.mark.expects("origins.lost")
@pytest.mark.guarantee("FP7", "I13")
def test_a_release_is_repeated_when_the_database_loses_it(
    own, database, connect, wait_for
):
    admin = connect(autocommit=True)
    first, second = Source(), Source()
    own(first)
    first.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 1}, what="the first one takes it")
    before = admin.execute("select owner from jobs_lib.origins").fetchone()
    first.revoke(["t/1"])
    own(second)
    second.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 2}, what="the second one takes it")
    admin.execute("update jobs_lib.origins set owner = %s, epoch = 1", before)
    wait_for(
        lambda: owners(admin) == {"t/1": 3},
        what="the first one lets go, and the second one has it again",
    )


@pytest.mark.guarantee("J20", "I7")
@pytest.mark.parametrize("was_away", [True, False], ids=["was away", "was there"])
def test_origins_of_silent_owners_are_taken_later_after_a_database_outage(
    own, silent, admin, wait_for, was_away
):
    stale_after = 3.0
    # The tests' server may have been started for this test.
    since_start = (
        "select clock_timestamp() - pg_postmaster_start_time() > interval '3 s'"
    )
    wait_for(lambda: admin.execute(since_start).fetchone() == (True,))
    source = Source()
    began_at = time.monotonic()
    own(source, stale_after=stale_after, was_away=was_away)
    source.replace(["t/1", "t/2"])
    wait_for(lambda: owners(admin) == {"t/1": 2, "t/2": 1}, what="both are taken")
    assert (time.monotonic() - began_at >= stale_after) == was_away


@pytest.mark.guarantee("J20", "I7")
def test_an_outage_that_ends_within_the_lease_makes_no_process_dead_either(
    database, monkeypatch
):
    clock = Clock()
    for module in ("process", "lease"):
        monkeypatch.setattr(f"jobs_lib.ownership.{module}.time", clock)
    process = Process(database, "pod", ["execute"], 1.0, stale_after=5.0)
    with database.connect("test") as connection:
        process._beat_once(connection)
        assert process.sees_others
        # Another process has beaten a second before, and cannot reach the database yet.
        clock.now += 4.2
        assert not process.lease.is_over()
        assert not process.sees_others
        for _ in range(5):
            process._beat_once(connection)
            assert not process.sees_others
            clock.now += 1.0
        process._beat_once(connection)
        assert process.sees_others


@pytest.mark.guarantee("I4", "I11")
def test_an_owner_that_beats_while_a_take_over_waits_keeps_its_origin(
    own, silent, admin, connect, wait_for
):
    commit = connect()
    commit.execute("select from jobs_lib.origins for share")
    source = Source()
    own(source)
    source.replace(["t/1"])
    waiting = (
        "select from pg_stat_activity"
        " where wait_event_type = 'Lock' and datname = current_database()"
    )
    wait_for(lambda: admin.execute(waiting).rowcount, what="the take-over waits")
    admin.execute(
        "update jobs_lib.processes set heartbeat_at = clock_timestamp() where id = %s",
        (silent,),
    )
    commit.rollback()
    # It continues: after that it takes the origins without an owner.
    source.replace(["t/1", "t/2"])
    wait_for(lambda: "t/2" in owners(admin), what="the other one is taken")
    assert owners(admin) == {"t/1": 1, "t/2": 1}


@pytest.mark.guarantee("I4", "I11")
def test_an_owner_that_wakes_during_a_take_over_waits_and_hears_of_it(
    silent, database, admin, connect, wait_for
):
    taker = connect()
    parameters = {
        "role": "execute",
        "origins": ["t/1"],
        "owners": [silent],
        "owner": uuid4(),
        "stale_after": 0.5,
        "sees_others": True,
        "last_epoch": 0,
    }
    queries = database.queries
    taker.execute(queries["lock_origins"], parameters)
    wait_for(
        lambda: taker.execute(queries["lock_dead"], parameters).fetchall(),
        what="it counts as dead",
    )
    heard_of: list[dict[str, int]] = []

    class Watcher:
        role = "execute"
        owned: ClassVar[dict[str, int]] = {"t/1": 1}

        def notice(self, believed, found):
            heard_of.append(found)

    process = Process(database, "pod", ["execute"], 0.2)
    process.id = silent
    process.add_watcher(Watcher())
    waking = threading.Thread(target=process.start)
    waking.start()
    waiting = (
        "select from pg_stat_activity"
        " where wait_event_type = 'Lock' and datname = current_database()"
    )
    wait_for(lambda: admin.execute(waiting).rowcount, what="its heartbeat waits")
    taker.execute(queries["take_origins"], parameters)
    taker.commit()
    waking.join()
    process.stop()
    assert heard_of[0] == {}


@pytest.mark.guarantee("I4", "I11")
@pytest.mark.parametrize("end", ["hears", "falls silent", "leaves"])
def test_an_origin_taken_from_a_live_owner_begins_once_that_owner_knows(
    own, silent, holder, admin, wait_for, end
):
    def beat() -> None:
        admin.execute(
            "update jobs_lib.processes set heartbeat_at = clock_timestamp()"
            " where id = %s",
            (silent,),
        )

    def look(origin: str) -> None:
        """Let the taker look around: by this moment it has taken another origin."""
        source.assign([origin])
        wait_for(lambda: origin in holder.epochs, what="it has looked around")

    beat()
    source = Source()
    ownership = own(source, stale_after=60.0)
    # The group's coordinator assigns a partition in the same way.
    source.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 2}, what="it is taken")
    look("t/2")
    # The first look may use an answer from before, and the second may be under way.
    beat()
    look("t/3")
    assert "t/1" not in holder.epochs
    assert ownership.owned["t/1"] == 2
    if end == "hears":
        beat()
    elif end == "leaves":
        admin.execute("delete from jobs_lib.processes where id = %s", (silent,))
    else:
        admin.execute(
            "update jobs_lib.processes set heartbeat_at = now() - interval '61 s'"
            " where id = %s",
            (silent,),
        )
    wait_for(lambda: holder.epochs.get("t/1") == 2, what="it begins")


def test_an_origin_taken_from_a_live_owner_can_be_released_before_it_begins(
    own, silent, holder, admin, wait_for
):
    admin.execute("update jobs_lib.processes set heartbeat_at = clock_timestamp()")
    source = Source()
    own(source, stale_after=60.0)
    source.assign(["t/1"])
    wait_for(lambda: owners(admin) == {"t/1": 2}, what="it is taken")
    source.revoke(["t/1"])
    wait_for(lambda: owners(admin) == {}, what="it is free")
    source.assign(["t/1"])
    wait_for(lambda: holder.epochs == {"t/1": 3}, what="it begins")
    assert holder.calls == [("take", frozenset({"t/1"}))]


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("I4", "I11")
def test_an_origin_taken_from_a_live_owner_waits_for_it_after_a_failure_too(
    own, silent, holder, admin, wait_for, monkeypatch
):
    admin.execute("update jobs_lib.processes set heartbeat_at = clock_timestamp()")
    take = holder.take

    def fail(origins):
        # An answer of the database that is lost does the same.
        monkeypatch.setattr(holder, "take", take)
        raise ConnectionError("the take-over is committed, and this is not known")

    monkeypatch.setattr(holder, "take", fail)
    source = Source()
    ownership = own(source, stale_after=60.0)
    source.assign(["t/1", "t/2"])
    wait_for(lambda: ownership.owned == {"t/1": 3, "t/2": 3}, what="both are taken")
    assert holder.epochs == {"t/2": 3}
    admin.execute("delete from jobs_lib.processes where id = %s", (silent,))
    wait_for(lambda: holder.epochs == {"t/1": 3, "t/2": 3}, what="both begin")


@pytest.mark.expects("loop.failed")
def test_an_origin_whose_release_failed_does_not_begin_before_its_owner_knows(
    own, silent, holder, admin, wait_for
):
    admin.execute("update jobs_lib.processes set heartbeat_at = clock_timestamp()")
    source = Source()
    ownership = own(source, stale_after=60.0)
    source.assign(["t/1"])
    wait_for(lambda: ownership.owned == {"t/1": 2}, what="it is taken")
    admin.execute(FAIL_RELEASES)
    source.revoke(["t/1"])
    wait_for(lambda: ownership._idle, what="its row cannot be released")
    source.assign(["t/1"])
    wait_for(lambda: ownership.owned == {"t/1": 3}, what="it is taken anew")
    assert holder.calls == []
    admin.execute("delete from jobs_lib.processes where id = %s", (silent,))
    wait_for(lambda: holder.epochs == {"t/1": 3}, what="it begins")
    admin.execute("drop trigger fail on jobs_lib.origins")
