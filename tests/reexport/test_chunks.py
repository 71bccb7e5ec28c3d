"""A chunk job writes the outbox rows of its keys once, and only if there is room."""

from __future__ import annotations

import re

import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.jobs.job import Discard, Snooze
from jobs_lib.operating import explain
from jobs_lib.partitioner import choose_partition, choose_shard
from jobs_lib.postgres.queries import load_queries
from jobs_lib.reexport.chunks import ChunkExporter, allowed_rows, snooze_bound
from jobs_lib.reexport.control import finish_open
from jobs_lib.reexport.loading import KeyList
from tests.reexport.helpers import make_entity, make_job, make_table, query
from tests.support.apps import executing, make_app

ROWS = """
    select shard, class, topic, key, value, entity, cause, reexport_id
    from jobs_lib.outbox order by key
"""


@pytest.fixture
def running(database):
    # All in one origin, so that each of its chunks is full.
    keys = (f"N{n:05}" for n in range(20_000))
    in_one = [key for key in keys if choose_partition(key, 16) == 3]
    make_table(database, in_one[:500])
    return reexport.start(database, make_entity(), rate=600).id


@pytest.fixture
def exporter(database):
    return ChunkExporter(lambda: load_queries(database.schema))


def look_again(exporter):
    """Forget the last look at the outbox, as happens after half a second."""
    exporter._rooms.clear()


def test_rows_carry_only_the_key(database, running, exporter):
    exporter.export(make_job(database), running, ["N001", "ä'\\"])
    topic = "aircraft-state"
    assert query(database, ROWS) == [
        (choose_shard(topic, key, 16), 1, topic, key, None, "aircraft", "reexport", 1)
        for key in ("N001", "ä'\\")
    ]


def test_a_full_outbox_sends_the_job_to_sleep(database, running, exporter):
    chunks = [[f"N{n:03}" for n in range(i, i + 50)] for i in range(0, 150, 50)]
    exporter.export(make_job(database), running, chunks[0])
    exporter.export(make_job(database), running, chunks[1])
    for _ in range(2):  # once from memory, and once by a count
        with pytest.raises(Snooze, match="holds enough") as error:
            exporter.export(make_job(database), running, chunks[2])
        assert 0.5 <= error.value.seconds <= 60
        look_again(exporter)
    assert len(query(database, ROWS)) == 100
    query(database, "delete from jobs_lib.outbox returning 1")
    exporter.export(make_job(database), running, chunks[2])
    assert len(query(database, ROWS)) == 50


def test_a_chunk_that_waits_for_the_rate_says_so_and_goes_on(
    database, database_url, running, wait_for
):
    app = make_app(database_url)
    topic = app.topic("aircraft-state")
    app.entity(topic, source="aircraft", key="tail")(lambda _conn, _keys: {})

    def told():
        jobs = query(database, "select id from jobs_lib.jobs")
        reasons = [
            reason for (job,) in jobs for reason in explain(database, job).reasons
        ]
        return [reason.text for reason in reasons if reason.code == "rate_limited"]

    with executing(app, [f"local/{n}" for n in range(16)]):
        text = wait_for(told, what="a chunk waits for the rate")[0]
        assert re.match(r"rate limited until 20.*: the re-export sends 600 rec", text)
        # Another chunk that has its room may still be writing.
        allowed = allowed_rows(600, 100)
        assert allowed < 500
        wait_for(lambda: len(query(database, ROWS)) == allowed, what="the room is full")
        query(database, "delete from jobs_lib.outbox returning 1")
        wait_for(lambda: query(database, ROWS), what="the next one goes on")


def test_other_rows_of_the_outbox_do_not_count(database, running, exporter):
    query(
        database,
        "insert into jobs_lib.outbox (shard, class, topic, key, reexport_id)"
        " select n % 16, n % 2, 't', n::text, case n % 4 when 1 then 99 end"
        " from generate_series(1, 1000) n returning 1",
    )
    exporter.export(make_job(database), running, ["N001"])
    assert query(database, "select count(*) from jobs_lib.outbox") == [(1_001,)]


def test_a_paused_re_export_writes_rows_only_after_it_resumes(
    database, running, exporter
):
    assert reexport.pause(database, "aircraft").state == "paused"
    for _ in range(2):
        with pytest.raises(Snooze, match="paused"):
            exporter.export(make_job(database), running, ["N001"])
    assert query(database, ROWS) == []
    assert reexport.resume(database, "aircraft").state == "running"
    look_again(exporter)
    exporter.export(make_job(database), running, ["N001"])
    assert len(query(database, ROWS)) == 1


def test_a_pause_of_a_re_export_holds_before_the_next_poll(database, running, exporter):
    exporter.export(make_job(database), running, ["N001"])
    reexport.pause(database, "aircraft")
    with pytest.raises(Snooze, match="paused"):
        exporter.export(make_job(database), running, ["N002"])


def test_a_cancelled_reexport_writes_nothing_more(database, running, exporter):
    exporter.export(make_job(database), running, ["N001"])
    assert reexport.cancel(database, "aircraft").state == "cancelled"
    exporter.export(make_job(database), running, ["N002"])
    assert [row[3] for row in query(database, ROWS)] == ["N001"]


def test_a_reexport_that_was_deleted_discards_its_chunks(database, exporter):
    with pytest.raises(Discard, match="no longer"):
        exporter.export(make_job(database), 99, ["N001"])


def test_a_resumed_load_is_loading_until_all_ranges_are_in(database):
    make_table(database, range(100), "int")
    begun = reexport.begin(database, make_entity(), rate=60, ranges=2)
    reexport.pause(database, "aircraft")
    assert reexport.resume(database, "aircraft").state == "loading"
    reexport.pause(database, "aircraft")
    # Loading continues while nothing is sent.
    assert reexport.load(database, begun, reexport.SqlEngine()).state == "paused"
    assert reexport.resume(database, "aircraft").state == "running"


def test_a_re_export_ends_when_every_key_is_sent_or_superseded(database, running):
    text = "update jobs_lib.reexports set sent = %s, superseded = 20 returning id"
    query(database, text, 479)
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.left) == ("running", 1)
    assert progress.eta is not None
    query(database, text, 480)
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.left, progress.eta) == ("finished", 0, None)
    assert progress.finished_at is not None
    with pytest.raises(ReexportError, match="is finished"):
        reexport.pause(database, "aircraft")


def test_the_rate_of_a_running_re_export_can_be_changed(database, running):
    assert reexport.set_rate(database, "aircraft", 1_200).rate == 1_200
    with pytest.raises(ReexportError, match="records a minute"):
        reexport.set_rate(database, "aircraft", 0)


def count_asleep(database, seconds):
    """Chunk jobs that sleep for longer, and others that do."""
    return query(
        database,
        "select count(*) filter (where is_own), count(*) filter (where not is_own)"
        " from (select type like 'jobs_lib.reexport%%' and payload->>'reexport' = '1'"
        " as is_own from jobs_lib.jobs"
        " where run_at > clock_timestamp() + make_interval(secs => %s)) j",
        seconds,
    )[0]


@pytest.mark.guarantee("W28")
def test_chunks_that_sleep_for_a_rate_that_is_no_more_wake_up(database, running):
    query(
        database,
        "insert into jobs_lib.jobs (origin, type, payload) values"
        " ('local/3', 'jobs_lib.reexport.stale', '{\"reexport\": 1}'),"
        " ('local/4', 'jobs_lib.reexport', '{\"reexport\": 12}'),"
        " ('local/4', 'work', '{\"reexport\": 1}') returning id",
    )
    asleep = (
        "update jobs_lib.jobs set state = 'scheduled',"
        " run_at = clock_timestamp() + interval '1 hour' returning id"
    )
    jobs = len(query(database, asleep)) - 2
    assert jobs >= 6
    # A lower rate wakes nobody.
    reexport.set_rate(database, "aircraft", 1)
    assert count_asleep(database, 3_590) == (jobs, 2)
    reexport.set_rate(database, "aircraft", 6_000)
    assert count_asleep(database, snooze_bound(500, 6_000)) == (0, 2)
    # A start that goes on with it gives it its rate, too.
    query(database, asleep)
    reexport.start(database, make_entity(), rate=600)
    assert count_asleep(database, snooze_bound(500, 600)) == (0, 2)
    query(database, asleep)
    reexport.cancel(database, "aircraft")
    assert count_asleep(database, 60) == (0, 2)


@pytest.mark.guarantee("W28")
def test_jobs_that_were_asleep_too_late_for_a_new_rate_wake_up_once_no_row_is_left(
    database,
):
    make_table(database, (f"N{n:05}" for n in range(2_000)))
    begun = reexport.begin(database, make_entity(), rate=1, ranges=4)
    queries = database.queries

    def change_rate(*args):
        # Its loader has read the old one, and commits its jobs after this.
        reexport.set_rate(database, "aircraft", 60_000)
        return KeyList.read(*args)

    with database.connect("test") as connection:
        reexport.load_range(connection, queries, begun.loading, 0)
        reexport.load_range(connection, queries, begun.loading, 1, change_rate)
    bound = snooze_bound(1_000, 60_000)
    late, _ = count_asleep(database, bound)
    assert late > 10
    query(
        database,
        "update jobs_lib.jobs set attempt = 1 where id = ("
        " select max(id) from jobs_lib.jobs where state = 'scheduled') returning id",
    )
    # While rows are left, nobody waits for these jobs.
    write = (
        "insert into jobs_lib.outbox (shard, class, topic, key, reexport_id)"
        " values (0, 1, 't', 'k', 1) returning 1"
    )
    query(database, write)
    finish_open(database)
    assert count_asleep(database, bound) == (late, 0)
    query(database, "delete from jobs_lib.outbox returning 1")
    finish_open(database)
    # The one that has failed waits for its next try.
    assert count_asleep(database, bound) == (1, 0)


def test_jobs_that_were_asleep_too_late_for_a_cancel_wake_up(database):
    make_table(database, (f"N{n:05}" for n in range(2_000)))
    begun = reexport.begin(database, make_entity(), rate=1, ranges=4)
    queries = database.queries

    def cancel(*args):
        # Its loader has seen that it runs, and commits its jobs after this.
        reexport.cancel(database, "aircraft")
        return KeyList.read(*args)

    with database.connect("test") as connection:
        reexport.load_range(connection, queries, begun.loading, 0)
        reexport.load_range(connection, queries, begun.loading, 1, cancel)
    late, _ = count_asleep(database, 60)
    assert late > 10
    finish_open(database)
    assert count_asleep(database, 60) == (0, 0)


def test_the_status_of_an_entity_never_re_exported_names_the_command(database):
    with pytest.raises(ReexportError, match="reexport start workers"):
        reexport.status(database, "workers")


@pytest.mark.parametrize(
    ("rate", "rows"), [(60, 200), (6_000, 1_000), (10_000_000, 50_000)]
)
def test_about_ten_seconds_wait_in_the_outbox(rate, rows):
    assert allowed_rows(rate, 100) == rows


@pytest.mark.parametrize(
    ("left", "seconds"), [(0, 1), (100, 1), (1_000, 2.5), (2_000_000, 5_000)]
)
def test_jobs_sleep_longer_the_more_there_are(left, seconds):
    assert snooze_bound(left, 6_000) == seconds


@pytest.mark.parametrize(
    ("left", "measured", "seconds"),
    [
        # The relays send a tenth of the rate: the end comes ten times as late.
        (1_000, 600, 10),
        (400, 600, 10),
        (200, 600, 5),
        # They are as fast as they should be, or nobody knows.
        (1_000, 6_000, 2.5),
        (1_000, None, 2.5),
        # They sent nothing, as after a pause. The rows in the outbox last for so long.
        (1_000, 0, 10),
        (2_000_000, 0, 5_000),
    ],
)
def test_jobs_sleep_longer_where_the_rate_cannot_be_reached(left, measured, seconds):
    assert snooze_bound(left, 6_000, measured) == seconds


def test_jobs_of_the_application_may_have_a_field_of_the_same_name(database, running):
    query(
        database,
        "insert into jobs_lib.jobs (origin, type, state, payload, run_at)"
        " select min(origin), 'report', 'scheduled', %s::jsonb,"
        " clock_timestamp() + interval '1 day' from jobs_lib.jobs returning 1",
        '{"reexport": true}',
    )
    reexport.set_rate(database, "aircraft", 60_000)
    reexport.cancel(database, "aircraft")
    asleep = "select type from jobs_lib.jobs where run_at > now() + interval '2 min'"
    assert query(database, asleep) == [("report",)]
