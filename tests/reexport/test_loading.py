"""Each key is loaded once, through repeats, several loaders and failures."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import UTC, datetime

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.partitioner import choose_origin
from jobs_lib.reexport import SqlEngine, begin, load, load_range, run
from jobs_lib.reexport.chunks import snooze_bound
from jobs_lib.reexport.loading import KeyList, Loading, encode_chunks
from jobs_lib.reexport.run import next_wave, refill_at
from tests.reexport.helpers import (
    loaded_keys,
    make_entity,
    make_table,
    origins_of_keys,
    query,
)

KEYS = [f"N{n:04}" for n in range(1_000)]
NOW = datetime.now(UTC)


@pytest.fixture
def begun(database):
    make_table(database, KEYS)
    return begin(database, make_entity(), rate=6_000, ranges=4, chunk=30)


class Clock:
    """A clock that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def load_all(database, begun):
    with database.connect("test") as connection:
        return [
            load_range(connection, database.queries, begun.loading, number)
            for number in range(4)
        ]


LIMITS = """
select name, setting from pg_settings where name in (
    'idle_in_transaction_session_timeout', 'tcp_keepalives_idle', 'tcp_user_timeout'
)
"""
NOTING = f"""
create table noted (name text, setting text);
create function note() returns trigger language plpgsql as $$ begin
    insert into noted {LIMITS};
    return new;
end $$;
create trigger note before update of total on jobs_lib.reexports
for each row execute function note();
"""


@pytest.mark.guarantee("X6")
def test_the_server_ends_a_loader_that_stands_still_before_others_wait_long(
    database, begun
):
    seen = {}

    def read(connection, *args):
        seen.update(connection.execute(LIMITS).fetchall())
        return KeyList.read(connection, *args)

    with database.connect("test") as connection:
        connection.execute(NOTING)
        before = connection.execute(LIMITS).fetchall()
        load_range(connection, database.queries, begun.loading, 0, read)
        assert connection.execute(LIMITS).fetchall() == before
    # The range waits for it.
    assert seen == {
        "idle_in_transaction_session_timeout": "60000",
        "tcp_keepalives_idle": "15",
        "tcp_user_timeout": "30000",
    }
    # Relays wait for it, with their live rows.
    noted = dict(query(database, "select * from noted"))
    assert noted["idle_in_transaction_session_timeout"] == "10000"


def test_a_range_loaded_twice_is_loaded_once(database, begun):
    assert load_all(database, begun) == [250] * 4
    assert load_all(database, begun) == [None] * 4
    assert loaded_keys(database) == KEYS
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.loaded) == ("running", 1_000)


@pytest.mark.parametrize(
    ("key", "told"), [("é" * 501, "501 characters is too long"), ("", "a key is empty")]
)
def test_a_key_that_no_record_may_have_is_refused(database, key, told):
    make_table(database, ["short", key])
    begun = begin(database, make_entity(), rate=6_000, ranges=1)
    with (
        database.connect("test") as connection,
        pytest.raises(ReexportError, match=told),
    ):
        load_range(connection, database.queries, begun.loading, 0)
    assert loaded_keys(database) == []


@pytest.mark.guarantee("X6")
def test_two_loaders_at_once_load_each_range_once(database, begun):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(load_all(database, begun)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded_keys(database) == KEYS
    loaded = [keys for result in results for keys in result if keys is not None]
    assert loaded == [250] * 4
    assert reexport.status(database, "aircraft").state == "running"


def test_the_last_range_to_commit_sees_the_end_of_loading(database, begun, wait_for):
    def last():
        with database.connect("last") as connection:
            load_range(connection, database.queries, begun.loading, 3)

    with database.connect("test") as connection:
        for number in range(2):
            load_range(connection, database.queries, begun.loading, number)
        thread = threading.Thread(target=last)
        with connection.transaction():
            load_range(connection, database.queries, begun.loading, 2)
            thread.start()
            waiting = (
                "select from pg_stat_activity where application_name = 'jobs_lib last'"
                " and wait_event_type = 'Lock' and datname = current_database()"
            )
            wait_for(lambda: query(database, waiting), what="the last range waits")
        thread.join()
        # Read it directly: `status` would repair it.
        states = query(database, "select state from jobs_lib.reexports")
    assert states == [("running",)]


def test_a_loader_that_dies_between_copy_and_commit_leaves_nothing(database, begun):
    with database.connect("test") as connection:
        connection.execute("""
            create function fail() returns trigger language plpgsql as
            $$ begin raise 'killed'; end $$;
            create constraint trigger killed after update on jobs_lib.reexport_ranges
            deferrable initially deferred for each row execute function fail();
        """)
        with pytest.raises(psycopg.errors.RaiseException, match="killed"):
            load_range(connection, database.queries, begun.loading, 0)
        connection.execute("drop trigger killed on jobs_lib.reexport_ranges")
    assert loaded_keys(database) == []
    assert reexport.status(database, "aircraft").loaded == 0
    load_all(database, begun)
    assert loaded_keys(database) == KEYS


def test_a_cancelled_reexport_is_not_loaded_any_further(database, begun):
    with database.connect("test") as connection:
        load_range(connection, database.queries, begun.loading, 0)
    reexport.cancel(database, "aircraft")
    assert load_all(database, begun) == [None] * 4
    progress = load(database, begun, SqlEngine())
    assert (progress.state, progress.loaded_ranges) == ("cancelled", 1)


def test_a_second_start_goes_on_with_the_first(database, begun):
    with database.connect("test") as connection:
        load_range(connection, database.queries, begun.loading, 2)
    progress = reexport.start(database, make_entity(), rate=9_000)
    assert (progress.id, progress.rate, progress.loaded) == (begun.id, 9_000, 1_000)
    assert loaded_keys(database) == KEYS
    assert begin(database, make_entity(), rate=9_000).resumed


def test_starts_at_the_same_time_make_one_reexport(database):
    make_table(database, KEYS)
    gate = threading.Barrier(4)
    begun = []

    def start():
        gate.wait()
        begun.append(begin(database, make_entity(), rate=6_000))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.id for one in begun}) == 1
    assert sorted(one.resumed for one in begun) == [False, True, True, True]


def test_a_table_without_rows_is_done_at_once(database):
    make_table(database, [])
    progress = reexport.start(database, make_entity(), rate=60)
    assert (progress.state, progress.total) == ("finished", 0)


def test_keys_that_are_not_sent_yet_hold_the_loader_up(database, begun):
    waves = []

    class Recorder(SqlEngine):
        def load(self, database, loading, ranges):
            waves.append(list(ranges))
            super().load(database, loading, ranges)
            # Pretend that the relay has sent everything.
            query(database, "update jobs_lib.reexports set sent = total returning 1")

    load(database, begun, Recorder(), ahead=500)
    assert waves == [[0, 1], [2, 3]]
    assert reexport.status(database, "aircraft").state == "finished"


def test_loading_goes_on_when_half_of_the_keys_are_sent(database, monkeypatch):
    make_table(database, KEYS)
    begun = begin(database, make_entity(), rate=1, ranges=10)
    steps = iter([100, 249, 250, 700])
    said: list[object] = []

    class Recorder(SqlEngine):
        def load(self, database, loading, ranges):
            said.append(list(ranges))
            super().load(database, loading, ranges)

        def idle(self, seconds):
            sent = next(steps)
            said.append(sent)
            query(database, f"update jobs_lib.reexports set sent = {sent} returning 1")

    monkeypatch.setattr(run, "time", Clock())
    load(database, begun, Recorder(), ahead=500)
    assert said == [[0, 1, 2, 3, 4], 100, 249, 250, [5, 6], 700, [7, 8, 9]]
    assert loaded_keys(database) == KEYS


def test_an_engine_hears_for_how_long_nothing_was_to_be_loaded(
    database, begun, monkeypatch
):
    clock = Clock()
    said: list[object] = []

    class Recorder(SqlEngine):
        def load(self, database, loading, ranges):
            super().load(database, loading, ranges)
            clock.sleep(1_000)
            said.append("loaded")

        def idle(self, seconds):
            said.append(seconds)
            if seconds == 2:
                text = "update jobs_lib.reexports set sent = total returning 1"
                query(database, text)

    monkeypatch.setattr(run, "time", clock)
    load(database, begun, Recorder(), ahead=500)
    assert said == ["loaded", 0, 1, 2, "loaded"]


@pytest.mark.parametrize(
    ("rate", "keys"),
    [(6_000, 1_000_000), (300_000, 1_500_000), (10_000_000, 2_000_000)],
)
def test_keys_that_do_not_last_are_loaded_sooner(rate, keys):
    assert refill_at(2_000_000, rate) == keys


@pytest.mark.parametrize(
    ("room", "idle", "wave"),
    [(0, False, []), (10, False, [3]), (25, False, [3, 5]), (0, True, [3])],
)
def test_a_wave_holds_as_many_ranges_as_there_is_room_for(room, idle, wave):
    assert next_wave([(3, 10), (5, 10), (6, 10)], room, idle=idle) == wave


@pytest.mark.guarantee("X5")
def test_each_key_is_in_a_job_of_its_own_origin(database, begun):
    load(database, begun, SqlEngine())
    assert origins_of_keys(database) == {
        key: choose_origin(key, "local", 16) for key in KEYS
    }


def test_a_chunk_is_as_long_as_it_may_be(database):
    make_table(database, KEYS)
    begun = begin(database, make_entity(), rate=6_000, ranges=1, chunk=30)
    load(database, begun, SqlEngine())
    keys_of = Counter(origins_of_keys(database).values())
    chunks = query(
        database,
        "select origin, (payload->'reexport')::int, jsonb_array_length(payload->'keys')"
        " from jobs_lib.jobs",
    )
    assert {reexport for _, reexport, _ in chunks} == {begun.id}
    for origin, keys in keys_of.items():
        lengths = sorted(length for where, _, length in chunks if where == origin)
        assert lengths == sorted([30] * (keys // 30) + [keys % 30] * (keys % 30 > 0))


@pytest.mark.guarantee("W28")
def test_chunks_that_would_find_no_room_are_loaded_asleep(database):
    make_table(database, (f"N{n:05}" for n in range(9_000)))
    begun = begin(database, make_entity(), rate=600, ranges=9)
    load(database, begun, SqlEngine())
    asleep = query(
        database,
        "select min(run_at - enqueued_at) > interval '0 s',"
        " max(run_at - clock_timestamp()) < make_interval(secs => %s),"
        " sum(jsonb_array_length(payload->'keys')), count(distinct run_at)"
        " from jobs_lib.jobs where state = 'scheduled'",
        snooze_bound(9_000, 600),
    )
    # The first range may leave at once. Each of the others wakes up at another time.
    assert asleep == [(True, True, 8_000, 8)]
    assert len(loaded_keys(database)) == 9_000


def test_chunks_for_which_there_is_room_are_due_at_once(database):
    make_table(database, (f"N{n:05}" for n in range(9_000)))
    load(database, begin(database, make_entity(), rate=60_000, ranges=9), SqlEngine())
    assert query(database, "select distinct state, run_at from jobs_lib.jobs") == [
        ("available", None)
    ]


def test_odd_keys_survive_the_copy():
    keys = ["a\\b", 'c"d', "e\tf\ng", "ä€😀", "\\N", "\u2028"]
    loading = Loading(7, NOW, None, 4, "t", 3)
    text = b"".join(encode_chunks(loading, keys, [2] * 6)).decode()
    lines = text.rstrip("\n").split("\n")
    assert [line.split("\t")[0] for line in lines] == ["t/2", "t/2"]
    read = [json.loads(line.split("\t")[4].replace("\\\\", "\\")) for line in lines]
    assert [key for one in read for key in one["keys"]] == keys


def test_an_unknown_range_is_named(database, begun):
    with (
        database.connect("test") as connection,
        pytest.raises(ReexportError, match="no range 99"),
    ):
        load_range(connection, database.queries, begun.loading, 99)


@pytest.mark.guarantee("FP7")
def test_a_reexport_that_was_given_the_id_of_a_lost_one_is_not_loaded_into(
    database, begun
):
    # A server that has lost its last commits gives an id twice.
    query(
        database,
        "update jobs_lib.reexports set started_at = started_at + interval '1 second'"
        " returning id",
    )
    with pytest.raises(ReexportError, match="lost its last commits"):
        load_all(database, begun)
    assert loaded_keys(database) == []
