"""All ranges of a load show the table at one moment, where that is asked for."""

from __future__ import annotations

import threading

import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.postgres.database import Database
from jobs_lib.reexport import SqlEngine, begin, load, load_range, snapshot, start
from jobs_lib.reexport.snapshot import Hold, hold_snapshot
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query

KEYS = [f"N{n:04}" for n in range(1_000)]
HOLD = Hold(60, 10_000)
HOLDERS = (
    "select pid from pg_stat_activity where datname = current_database()"
    " and application_name = 'jobs_lib re-export snapshot'"
)


class Changing(SqlEngine):
    """Loads ranges, while somebody changes the table before and after each."""

    def load(self, database, loading, ranges):
        for number in ranges:
            change(database, number)
            super().load(database, loading, [number])
            change(database, number + 100)


def change(database, number):
    """Insert, delete, and give rows other keys, in every range."""
    query(
        database,
        "with i as (insert into aircraft select tail || '-' || %s from aircraft"
        "  where tail like '%%7' returning 1),"
        " d as (delete from aircraft where tail like '%%3' and length(tail) = 5"
        "  returning 1),"
        " u as (update aircraft set tail = 'M' || tail where tail like '%%5')"
        " select count(*) from i, d",
        number,
    )


@pytest.fixture
def table(database):
    make_table(database, KEYS)


@pytest.mark.guarantee("X3")
@pytest.mark.usefixtures("table")
def test_keys_are_those_of_one_moment_whatever_changes_meanwhile(database):
    progress = start(
        database,
        make_entity(),
        rate=6_000,
        ranges=8,
        engine=Changing(),
        snapshot=True,
    )
    assert loaded_keys(database) == KEYS
    assert (progress.loaded, progress.snapshot) == (1_000, True)
    # It is let go.
    assert query(database, HOLDERS) == []


@pytest.mark.usefixtures("table")
def test_without_a_snapshot_ranges_show_the_table_at_their_moments(database):
    start(database, make_entity(), rate=6_000, ranges=8, engine=Changing())
    assert loaded_keys(database) != KEYS
    assert reexport.status(database, "aircraft").snapshot is None


@pytest.mark.guarantee("X3")
@pytest.mark.usefixtures("table")
def test_loaders_in_parallel_share_the_snapshot(database):
    begun = begin(database, make_entity(), rate=6_000, ranges=12, hold=HOLD)
    with hold_snapshot(database, begun, 60) as held:
        change(database, 0)

        def load_all():
            SqlEngine().load(database, held.loading, range(12))

        threads = [threading.Thread(target=load_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert loaded_keys(database) == KEYS


@pytest.mark.guarantee("X3")
@pytest.mark.usefixtures("table")
def test_the_server_lets_it_go_if_its_holder_stands_still(
    database, wait_for, monkeypatch
):
    # As in a process that is stopped: its own timer never rings.
    monkeypatch.setattr(threading.Timer, "start", lambda _: None)
    monkeypatch.setattr(snapshot, "_SERVER_WAITS", 0.3)
    begun = begin(database, make_entity(), rate=6_000, ranges=2, hold=HOLD)
    with hold_snapshot(database, begun, 0.2) as held:
        wait_for(lambda: query(database, HOLDERS) == [], what="it is let go")
        with pytest.raises(ReexportError, match="no longer held"):
            SqlEngine().load(database, held.loading, [0])
    assert loaded_keys(database) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"ahead": 999}, "1,000 keys are more than the 999"),
        ({"hold_for": 0.1}, r"may take 0 seconds .* be held for 0"),
        ({"hold_for": 0}, "not 0"),
        ({"hold_for": float("nan")}, "not nan"),
        ({"hold_for": 1e9}, "at most a day"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_load_that_would_hold_it_for_too_long_is_refused(database, values, told):
    with pytest.raises(ReexportError, match=told):
        start(database, make_entity(), rate=6_000, snapshot=True, **values)
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]


@pytest.mark.usefixtures("table")
def test_behind_pgbouncer_it_needs_the_direct_url(database):
    behind = Database(database.url, pgbouncer=True)
    with pytest.raises(ReexportError, match="JOBS_LIB_DIRECT_URL"):
        start(behind, make_entity(), rate=6_000, snapshot=True)
    direct = Database(database.url, pgbouncer=True, direct_url=database.url)
    assert start(direct, make_entity(), rate=6_000, snapshot=True).snapshot
    assert loaded_keys(database) == KEYS


@pytest.mark.usefixtures("table")
def test_it_is_given_up_when_its_time_is_over(database, wait_for):
    class Slow(SqlEngine):
        def load(self, database, loading, ranges):
            super().load(database, loading, [0])
            wait_for(lambda: not query(database, HOLDERS), what="it is given up")
            super().load(database, loading, ranges)

    with pytest.raises(ReexportError, match="held for 1 seconds and is given up"):
        start(
            database,
            make_entity(),
            rate=6_000,
            ranges=4,
            engine=Slow(),
            snapshot=True,
            hold_for=1,
        )
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.loaded, progress.ranges) == ("loading", 250, 4)
    progress = start(database, make_entity(), rate=6_000)
    assert (progress.loaded, progress.snapshot) == (1_000, False)


@pytest.mark.usefixtures("table")
def test_a_resumed_load_cannot_have_the_snapshot_that_ended(database, wait_for):
    class Dying(SqlEngine):
        def load(self, database, loading, ranges):
            super().load(database, loading, [0])
            query(database, f"select pg_terminate_backend(pid) from ({HOLDERS}) h")
            wait_for(lambda: not query(database, HOLDERS), what="it is gone")
            super().load(database, loading, ranges)

    with pytest.raises(ReexportError, match="is no longer held"):
        start(
            database,
            make_entity(),
            rate=6_000,
            ranges=4,
            engine=Dying(),
            snapshot=True,
        )
    with pytest.raises(ReexportError, match="has loaded 1 ranges, and a snapshot ends"):
        start(database, make_entity(), rate=90, snapshot=True)
    progress = reexport.status(database, "aircraft")
    assert (progress.rate, progress.snapshot) == (6_000, True)
    assert start(database, make_entity(), rate=90).snapshot is False
    assert loaded_keys(database) == KEYS


@pytest.mark.usefixtures("table")
def test_what_is_loaded_whole_keeps_its_snapshot(database):
    start(database, make_entity(), rate=6_000, snapshot=True)
    # Only the rate is new.
    assert start(database, make_entity(), rate=90).snapshot
    assert start(database, make_entity(), rate=60, snapshot=True).snapshot


@pytest.mark.usefixtures("table")
def test_loaders_of_two_moments_do_not_mix(database):
    """A start takes over from another one, which may still be at work."""
    plain = begin(database, make_entity(), rate=6_000, ranges=4)
    with database.connect("test") as connection:

        def load_first(begun):
            return load_range(connection, database.queries, begun.loading, 0)

        with hold_snapshot(database, plain, 60) as first:
            with pytest.raises(ReexportError, match="was started once more"):
                load_first(plain)
            with (
                hold_snapshot(database, plain, 60),
                pytest.raises(ReexportError, match="was started once more"),
            ):
                load_first(first)
        with hold_snapshot(database, plain, 60) as last:
            begin(database, make_entity(), rate=6_000)
            with pytest.raises(ReexportError, match="was started once more"):
                load_first(last)
        assert loaded_keys(database) == []
        assert load_first(plain) == 250
    with (
        pytest.raises(ReexportError, match="has loaded 1 ranges"),
        hold_snapshot(database, plain, 60),
    ):
        pass
    assert load(database, plain, SqlEngine()).loaded == 1_000
