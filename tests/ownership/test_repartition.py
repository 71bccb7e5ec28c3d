"""The home topic's number of partitions changes: groups move, whole and in order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.errors import TopicError
from jobs_lib.operating import retry
from jobs_lib.operating.home_topic import repartition
from jobs_lib.partitioner import choose_origin
from tests.operating.helpers import add_discarded
from tests.support.apps import HOME, executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

BEFORE, AFTER = len(HOME), 24
GROUPS = [f"g{n}" for n in range(40)]


@pytest.fixture
def app(database_url):
    """An app with one type and the default home."""
    app = make_app(database_url)

    @app.job(group="group")
    def work(job: Job, group: str) -> None: ...

    return app


@pytest.fixture
def waits(admin, wait_for):
    """A function that waits until this many backends wait for an advisory lock."""

    def waits(backends: int = 1) -> None:
        wait_for(
            lambda: (
                admin.execute(
                    "select from pg_locks where locktype = 'advisory' and not granted"
                ).rowcount
                >= backends
            ),
            what="a session waits for a lock",
        )

    return waits


def places(admin) -> dict[int, tuple[str, str]]:
    rows = admin.execute('select id, origin, "group" from jobs_lib.jobs order by id')
    return {job_id: (origin, group) for job_id, origin, group in rows}


def expect_places(admin, partitions: int) -> None:
    found = places(admin)
    assert found
    assert [origin for origin, _ in found.values()] == [
        choose_origin(group, "local", partitions) for _, group in found.values()
    ]


@pytest.mark.guarantee("S21")
def test_queued_jobs_move_with_their_groups_under_their_ids(app, admin, connect):
    work = app.jobs["work"]
    with connect() as connection:
        work.enqueue_many(connection, [{"group": g} for g in GROUPS * 5])
        own = work.options(origin="local/3").enqueue(connection, group="elsewhere")
    admin.execute(
        'insert into jobs_lib.discarded (id, origin, type, "group", attempt, priority,'
        ' payload, enqueued_at, errors) select id + 1000000, origin, type, "group", 1,'
        " 0, payload, enqueued_at, '[]' from jobs_lib.jobs where id <> %s",
        (own,),
    )
    before = places(admin)
    moved = repartition(app, AFTER)
    after = places(admin)
    assert after.pop(own)[0] == before.pop(own)[0] == "local/3"
    assert moved == sum(before[i] != after[i] for i in before) > 0
    assert {i: group for i, (_, group) in after.items()} == {
        i: group for i, (_, group) in before.items()
    }
    assert all(o == choose_origin(g, "local", AFTER) for o, g in after.values())
    discarded = admin.execute('select origin, "group" from jobs_lib.discarded')
    assert all(o == choose_origin(g, "local", AFTER) for o, g in discarded)
    assert repartition(app, AFTER) == 0


@pytest.mark.guarantee("S21")
def test_an_app_that_knows_the_old_number_enqueues_by_the_new_one(app, admin, connect):
    work = app.jobs["work"]
    with connect() as connection:
        # From here on the app knows the number of partitions.
        work.enqueue(connection, group="g0")
        connection.commit()
        repartition(make_app(app.settings.database_url), AFTER)
        for group in GROUPS:
            work.enqueue(connection, group=group)
            connection.execute(
                "select jobs_lib.enqueue('work', jsonb_build_object('group', %s::text),"
                " %s)",
                (group, group),
            )
        work.enqueue_many(connection, [{"group": g} for g in GROUPS])
        work.options(ordered=False).enqueue_many(
            connection, [{"group": g} for g in GROUPS]
        )
        connection.commit()
    expect_places(admin, AFTER)


@pytest.mark.guarantee("S21", "FK8")
@pytest.mark.parametrize("how", ["one", "many", "sql"])
def test_enqueues_and_a_move_wait_for_each_other(app, admin, connect, waits, how):
    work = app.jobs["work"]

    def enqueue(connection) -> None:
        if how == "one":
            work.enqueue(connection, group="late")
        elif how == "many":
            work.options(ordered=False).enqueue_many(connection, [{"group": "late"}])
        else:
            connection.execute(
                "select jobs_lib.enqueue('work', '{\"group\": \"late\"}', 'late')"
            )
        connection.commit()

    with connect() as early, connect() as late:
        for group in GROUPS:
            work.enqueue(early, group=group)
        move = threading.Thread(target=repartition, args=(app, AFTER))
        move.start()
        waits()
        other = threading.Thread(target=enqueue, args=(late,))
        other.start()
        early.commit()
        move.join()
        other.join()
    expect_places(admin, AFTER)


@pytest.mark.guarantee("S21")
def test_jobs_retried_while_a_move_is_open_lie_by_the_new_number(
    app, database, admin, connect, waits
):
    jobs = [
        add_discarded(admin, group=g, origin=choose_origin(g, "local", BEFORE))
        for g in GROUPS
    ]
    with connect() as early:
        app.jobs["work"].enqueue(early, group=GROUPS[0])
        move = threading.Thread(target=repartition, args=(app, AFTER))
        move.start()
        waits()
        retrying = threading.Thread(target=retry, args=(database, jobs))
        retrying.start()
        waits(2)
        early.commit()
        move.join()
        retrying.join()
    assert len(places(admin)) == len(GROUPS) + 1
    expect_places(admin, AFTER)


@pytest.mark.guarantee("S21")
def test_a_second_repartition_moves_the_jobs_that_the_first_one_moved(
    app, admin, connect, waits
):
    work = app.jobs["work"]
    with connect() as early:
        work.enqueue_many(early, [{"group": g} for g in GROUPS])
        moves = []
        # Back to the number before: by then there are jobs in the new origins.
        for partitions in (AFTER, BEFORE):
            moves.append(threading.Thread(target=repartition, args=(app, partitions)))
            moves[-1].start()
            waits(len(moves))
        early.commit()
        for move in moves:
            move.join()
    expect_places(admin, BEFORE)


@pytest.mark.guarantee("S21")
def test_a_snapshot_from_before_the_move_is_refused(app, connect):
    work = app.jobs["work"]
    with connect() as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        work.enqueue(connection, group="g0")
        connection.commit()
        connection.execute("select 1 from jobs_lib.topics")
        repartition(app, AFTER)
        with pytest.raises(psycopg.errors.SerializationFailure):
            work.enqueue(connection, group="g1")
        connection.rollback()
        work.enqueue(connection, group="g1")
        connection.commit()


def test_a_move_gives_up_in_time_and_has_changed_nothing(app, admin, connect):
    work = app.jobs["work"]
    with connect() as connection:
        work.enqueue(connection, group="g0")
        with pytest.raises(TopicError, match=r"more than 0\.1 s.*nothing was changed"):
            repartition(app, AFTER, wait=0.1)
        connection.commit()
    expect_places(admin, BEFORE)


def test_no_move_while_a_reexport_is_being_loaded(app, admin):
    admin.execute(
        "insert into jobs_lib.reexports (entity, topic, rate, state)"
        " values ('e', 't', 1, 'paused')"
    )
    admin.execute(
        "insert into jobs_lib.reexport_ranges (reexport_id, range, keys)"
        " values (1, 0, 5)"
    )
    with pytest.raises(TopicError, match="re-export 1 is being loaded"):
        repartition(app, AFTER)
    admin.execute("update jobs_lib.reexport_ranges set loaded_at = now()")
    assert repartition(app, AFTER) == 0


@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("S21", "J28")
def test_groups_stay_serial_and_in_order_while_they_move(app, admin, connect, wait_for):
    """Two executors share the origins; jobs are enqueued and run through two moves."""
    app = make_app(app.settings.database_url)

    @app.job(group="group")
    def work(job: Job, group: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s)", (group, n))

    admin.execute(
        'create table effects ("group" text, n int, place bigint generated always as'
        " identity, at timestamptz default clock_timestamp())"
    )
    stop = threading.Event()
    counts = dict.fromkeys(GROUPS[:8], 0)

    def send(group: str) -> None:
        with connect() as connection:
            while not stop.is_set():
                work.enqueue(connection, group=group, n=counts[group])
                connection.commit()
                counts[group] += 1

    every = [f"local/{n}" for n in range(AFTER)]
    senders = [threading.Thread(target=send, args=(g,)) for g in counts]
    with executing(app, every[::2]), executing(app, every[1::2]):
        for sender in senders:
            sender.start()
        for partitions in (AFTER, BEFORE, AFTER):
            begun = admin.execute("select count(*) from effects").fetchone()[0]
            repartition(app, partitions)
            wait_for(
                lambda begun=begun: (
                    admin.execute("select count(*) from effects").fetchone()[0]
                    > begun + 200
                ),
                timeout=60,
                what="jobs run after the move",
            )
        stop.set()
        for sender in senders:
            sender.join()
        wait_for(
            lambda: not admin.execute("select from jobs_lib.jobs limit 1").rowcount,
            timeout=60,
            what="all have run",
        )
    for group, count in counts.items():
        rows = admin.execute(
            'select n from effects where "group" = %s order by place', (group,)
        )
        assert [row[0] for row in rows] == list(range(count))


def test_the_present_number_fences_no_job(app, admin):
    repartition(app, AFTER)
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('execute', 'local/1', gen_random_uuid(), 7)"
        " on conflict (role, origin) do update set epoch = 7"
    )
    assert repartition(app, AFTER) == 0
    (epoch,) = admin.execute(
        "select epoch from jobs_lib.origins where (role, origin) = "
        "('execute', 'local/1')"
    ).fetchone()
    assert epoch == 7
