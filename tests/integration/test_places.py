"""Jobs keep the place of the record that they come from until they are done."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from jobs_lib import Discard, Job, operating
from jobs_lib.jobs.batch import Item  # noqa: TC001
from jobs_lib.jobs.job import RetryAfter
from jobs_lib.operating.home_topic import repartition
from tests.support.apps import HOME, count, executing, make_app
from tests.support.places import Partition
from tests.support.upgrades import makes_index

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from jobs_lib import App

IN_SQL = "select jobs_lib.enqueue('work', '{\"n\": 1}')"


@pytest.fixture
def app(database_url) -> App:
    """An app whose job does nothing."""
    app = make_app(database_url)

    @app.job()
    def work(job: Job, n: int) -> None: ...

    return app


@pytest.fixture
def partition(database, admin) -> Partition:
    """A partition of which the records before 100 are handled."""
    return Partition(database, admin)


def places(admin: psycopg.Connection[Any]) -> list[tuple[int | None, int | None]]:
    """Return the places of the rows of jobs."""
    return admin.execute(
        "select source, record_offset from jobs_lib.jobs order by id"
    ).fetchall()


def enqueue_one(app: App, url: str, place: str) -> None:
    with app.transaction() as conn:
        app.jobs["work"].enqueue(conn, n=1)


def copy_many(app: App, url: str, place: str) -> None:
    with app.transaction() as conn:
        app.jobs["work"].enqueue_many(conn, [{"n": 1}])


def insert_many(app: App, url: str, place: str) -> None:
    async def insert() -> None:
        # It has no COPY by which jobs could be enqueued.
        asyncpg = make_url(url).set(drivername="postgresql+asyncpg")
        engine = create_async_engine(asyncpg)
        async with engine.begin() as conn:
            await app.jobs["work"].enqueue_many(conn, [{"n": 1}])
        await engine.dispose()

    asyncio.run(insert())


def enqueue_in_sql(app: App, url: str, place: str) -> None:
    with app.transaction() as conn:
        conn.execute("select set_config('jobs_lib.place', %s, true)", (place,))
        conn.execute(IN_SQL)


def enqueue_in_thread(app: App, url: str, place: str) -> None:
    with app.transaction() as conn:
        conn.execute("select set_config('jobs_lib.place', %s, true)", (place,))
        thread = threading.Thread(
            target=lambda: app.jobs["work"].enqueue(conn, n=1), daemon=True
        )
        thread.start()
        thread.join()


WAYS = [enqueue_one, copy_many, insert_many, enqueue_in_sql, enqueue_in_thread]


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("enqueue", WAYS, ids=lambda way: way.__name__)
def test_a_job_enqueued_in_any_way_holds_back_the_place_of_its_record(
    app, admin, database_url, partition, wait_for, enqueue
):
    with partition.handling(7):
        enqueue(app, database_url, partition.place(7))
    assert places(admin) == [(partition.source, 7)]
    assert partition.tell() == 7
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="it is done")
    assert partition.tell() == 100


def test_a_job_enqueued_outside_of_a_record_has_no_place(app, admin, partition):
    for enqueue in (enqueue_one, copy_many):
        enqueue(app, "", "")
    with app.transaction() as conn:
        conn.execute(IN_SQL)
    assert places(admin) == [(None, None)] * 3
    assert partition.tell() == 100


def test_what_a_handler_leaves_behind_gets_no_place(app, admin, partition):
    with partition.handling(7):
        context = contextvars.copy_context()
    context.run(enqueue_one, app, "", "")
    assert places(admin) == [(None, None)]


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("how", ["one", "many", "sql", "batch"])
def test_what_a_job_enqueues_inherits_its_place(
    database_url, admin, partition, wait_for, how
):
    app = make_app(database_url)
    begun = threading.Event()
    may_end = threading.Event()

    @app.job()
    def work(job: Job, n: int) -> None:
        begun.set()
        assert may_end.wait(30)

    @app.job()
    def parent(job: Job) -> None:
        with job.transaction() as conn:
            if how == "one":
                work.enqueue(conn, n=1)
            elif how == "many":
                work.enqueue_many(conn, [{"n": 1}])
            else:
                conn.execute(IN_SQL)

    @app.batch(size=2)
    def parents(items: list[Item[int]]) -> None:
        with app.transaction() as conn:
            work.enqueue(conn, n=1)

    with partition.handling(7), app.transaction() as conn:
        if how == "batch":
            parents.enqueue(conn, 1)
        else:
            parent.enqueue(conn)
    with executing(app, HOME):
        assert begun.wait(30)
        wait_for(lambda: count(admin, "jobs") == 1, what="the parent is done")
        assert partition.tell() == 7
        may_end.set()
        wait_for(lambda: partition.tell() == 100, what="the child is done")


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_what_a_job_of_two_partitions_enqueues_holds_back_both(
    database, database_url, admin, wait_for, many
):
    app = make_app(database_url)
    first, second = (Partition(database, admin, number) for number in range(2))
    may_end = threading.Event()

    @app.job()
    def work(job: Job, n: int) -> None:
        assert may_end.wait(30)

    @app.job()
    def parent(job: Job) -> None:
        with job.transaction() as conn:
            if many:
                work.enqueue_many(conn, [{"n": n} for n in range(3)])
            else:
                work.enqueue(conn, n=1)

    for partition, offset in ((first, 7), (second, 9)):
        with partition.handling(offset), app.transaction() as conn:
            parent.options(unique="one").enqueue(conn)
    with executing(app, HOME):
        left = 3 if many else 1
        ended = "select count(*) from jobs_lib.history where type = 'parent'"
        wait_for(lambda: admin.execute(ended).fetchone() == (1,), what="it ran")
        assert count(admin, "jobs") == left
        assert (first.tell(), second.tell()) == (7, 9)
        may_end.set()
        wait_for(
            lambda: (first.tell(), second.tell()) == (100, 100), what="all is done"
        )
    assert count(admin, "kept_places") == 0


@pytest.mark.guarantee("K22")
def test_a_job_that_supersedes_others_holds_back_the_earliest_of_their_places(
    database, database_url, admin, wait_for
):
    app = make_app(database_url)
    first, second = (Partition(database, admin, number) for number in range(2))
    ran: list[int] = []
    may_end = threading.Event()

    @app.job(group="key", last_only=True)
    def last(job: Job, key: str, n: int) -> None:
        ran.append(n)
        assert may_end.wait(30)

    enqueued = [(first, 5), (second, 3), (first, 4), (first, 9), (second, 8)]
    for n, (partition, offset) in enumerate(enqueued):
        with partition.handling(offset), app.transaction() as conn:
            last.options(unique=f"u{n}").enqueue(conn, "k", n)
    # One of those that are superseded has a second place.
    with second.handling(2), app.transaction() as conn:
        last.options(unique="u2").enqueue(conn, "k", 2)
    with executing(app, HOME):
        wait_for(lambda: ran == [4], what="only the last one runs")
        assert (first.tell(), second.tell()) == (4, 2)
        may_end.set()
        wait_for(
            lambda: (first.tell(), second.tell()) == (100, 100), what="all is done"
        )
    assert count(admin, "kept_places") == 0


@pytest.mark.guarantee("K22")
def test_a_job_found_by_its_unique_key_keeps_the_earlier_place(
    app, database, admin, partition, wait_for
):
    other = Partition(database, admin, 1)
    work = app.jobs["work"].options(unique="k")
    with app.transaction() as conn:
        found = work.enqueue(conn, n=1)
    for one, offset in ((partition, 6), (partition, 8), (other, 9), (partition, 5)):
        with one.handling(offset), app.transaction() as conn:
            assert work.enqueue(conn, n=2) == found
    assert (partition.tell(), other.tell()) == (5, 9)
    # A later record of the same partition adds nothing.
    assert count(admin, "kept_places") == 3
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="it is done")
    assert (partition.tell(), other.tell()) == (100, 100)


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("is_done", [False, True], ids=["unfinished", "done"])
def test_a_retried_job_is_unfinished_and_a_discarded_one_as_its_type_says(
    database, database_url, admin, partition, wait_for, is_done
):
    app = make_app(database_url)
    fails: list[Callable[[], Exception]] = [lambda: RetryAfter(3_600), Discard]

    @app.job(discarded_is_done=is_done)
    def work(job: Job) -> None:
        if fails:
            raise fails.pop(0)()

    with partition.handling(7), app.transaction() as conn:
        id_ = work.options(unique="u").enqueue(conn)
    with partition.handling(5), app.transaction() as conn:
        work.options(unique="u").enqueue(conn)
    with executing(app, HOME):
        wait_for(lambda: len(fails) == 1, what="it has failed")
        scheduled = "select count(*) from jobs_lib.jobs where state = 'scheduled'"
        wait_for(lambda: admin.execute(scheduled).fetchone() == (1,), what="it waits")
        assert partition.tell() == 5
        operating.retry(database, [id_])
        wait_for(lambda: count(admin, "discarded") == 1, what="it is discarded")
        assert partition.tell() == (100 if is_done else 5)
        operating.retry(database, [id_])
        wait_for(lambda: count(admin, "jobs") == 0, what="it is done")
    assert partition.tell() == 100
    assert count(admin, "kept_places") == 0


@pytest.mark.guarantee("K22")
def test_what_a_discarded_job_enqueues_after_a_retry_by_hand_inherits_its_place(
    database, database_url, admin, partition, wait_for
):
    app = make_app(database_url)
    fails = [Discard]
    may_end = threading.Event()

    @app.job()
    def work(job: Job) -> None:
        assert may_end.wait(30)

    @app.job()
    def parent(job: Job) -> None:
        if fails:
            raise fails.pop()
        with job.transaction() as conn:
            work.enqueue(conn)

    with partition.handling(7), app.transaction() as conn:
        id_ = parent.enqueue(conn)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 1, what="it is discarded")
        operating.retry(database, [id_])
        query = "select type from jobs_lib.jobs"
        wait_for(
            lambda: admin.execute(query).fetchall() == [("work",)], what="it ran again"
        )
        assert partition.tell() == 7
        may_end.set()
        wait_for(lambda: partition.tell() == 100, what="all is done")


@pytest.mark.guarantee("K22")
def test_a_deleted_or_cancelled_job_holds_nothing_back(app, database, admin, partition):
    with app.transaction() as conn:
        app.jobs["work"].enqueue(conn, n=1)
    with partition.handling(7), app.transaction() as conn:
        id_ = app.jobs["work"].options(unique="u").enqueue(conn, n=1)
    with partition.handling(5), app.transaction() as conn:
        app.jobs["work"].options(unique="u").enqueue(conn, n=1)
    assert partition.tell() == 5
    operating.cancel(database, [id_])
    assert partition.tell() == 100
    assert count(admin, "kept_places") == 0


@pytest.mark.guarantee("K22")
def test_jobs_keep_their_places_when_their_groups_move_to_other_origins(
    database, database_url, admin, partition
):
    app = make_app(database_url)

    @app.job(group="key")
    def work(job: Job, key: str) -> None: ...

    for offset in (9, 5):
        for n in range(20):
            with partition.handling(offset + n), app.transaction() as conn:
                work.options(unique=f"u{n}").enqueue(conn, f"k{n}")
    assert repartition(app, 5) > 0
    assert partition.tell() == 5
    admin.execute("delete from jobs_lib.jobs")
    assert partition.tell() == 100


# Whoever is not the owner, and offsets that are set back


@pytest.mark.guarantee("K22")
def test_only_the_owner_at_its_epoch_tells(app, admin, partition):
    admin.execute("update jobs_lib.origins set epoch = 2 where role like 'consume:%'")
    assert partition.tell() is None
    partition.epoch = 2
    assert partition.tell() == 100


@pytest.mark.guarantee("K22")
def test_no_job_is_passed_when_the_offset_was_set_back(
    app, admin, connect, database_url, partition
):
    assert partition.tell() == 100
    partition.store(50)
    # The records are handled again, and their offset is where it was, before the owner
    # has looked once, or somebody else takes over.
    with connect() as conn:
        with partition.handling(60):
            app.jobs["work"].enqueue(conn, n=1)
        partition.advance(conn, 50, 70)
    with connect() as conn:
        partition.advance(conn, 70, 120)
    assert partition.tell() == 60
    admin.execute("delete from jobs_lib.jobs")
    assert partition.tell() == 120


@pytest.mark.guarantee("K22")
def test_an_offset_that_is_set_back_during_a_look_is_not_forgotten(
    app, admin, connect, partition, wait_for
):
    with partition.handling(90), app.transaction() as conn:
        app.jobs["work"].enqueue(conn, n=1)
    assert partition.tell() == 90
    # So the next look finds more than the last one.
    admin.execute("delete from jobs_lib.jobs")
    found: list[int | None] = []
    looking, other = connect(autocommit=True), connect()
    # The look has its snapshot, and waits for whoever has locked the origin.
    other.execute("select from jobs_lib.origins for update")
    look = threading.Thread(target=lambda: found.append(partition.find(looking)))
    look.start()
    waits = "select count(*) from pg_locks where not granted"
    wait_for(lambda: admin.execute(waits).fetchone() == (1,), what="it waits")
    partition.store(50, other)
    with partition.handling(60):
        app.jobs["work"].enqueue(other, n=1)
    partition.advance(other, 50, 120)
    other.commit()
    look.join(30)
    assert found == [100]
    assert partition.tell() == 60


@pytest.mark.guarantee("K22")
def test_a_job_that_a_later_look_may_not_skip_has_a_lower_id(
    app, admin, connect, partition
):
    """Of one record, a job whose id is lower may be committed later."""
    work = app.jobs["work"]
    with partition.handling(100):
        slow, quick = connect(), connect()
        work.enqueue(slow, n=1)
        work.enqueue(quick, n=2)
        quick.commit()
        assert partition.tell() == 100
        slow.commit()
    admin.execute("delete from jobs_lib.jobs where payload ->> 'n' = '2'")
    partition.store(101)
    assert partition.tell() == 100


# Tables and releases


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("rows", [10, 80_000], ids=["small", "large"])
def test_the_index_is_only_made_while_the_table_is_small(empty_url, rows, tmp_path):
    """While it is made, nobody can enqueue; a large one takes too long."""
    statements = [
        # Few rows to a page, so that few make a large table.
        "alter table jobs_lib.jobs set (fillfactor = 10)",
        (
            "insert into jobs_lib.jobs (origin, type, payload)"
            f" select 'local/0', 'work', '{{}}' from generate_series(1, {rows})"
        ),
    ]
    made = makes_index(empty_url, tmp_path, statements, "jobs_of_place")
    assert made is (rows == 10)


@pytest.mark.guarantee("K22", "J27")
def test_a_process_of_the_release_before_enqueues_beside_it(app, admin, partition):
    """It calls the function with fewer arguments, and copies fewer columns."""
    with admin.transaction():
        admin.execute(
            "select jobs_lib.insert_job('local/0', 'work', null, '{\"n\": 1}', null,"
            " 0::smallint, null, null, true, null, null)"
        )
    with admin.cursor().copy(
        'copy jobs_lib.jobs (origin, type, "group", payload, state, run_at, priority,'
        " headers) from stdin"
    ) as copy:
        copy.write("local/0\twork\t\\N\t{}\tavailable\t\\N\t0\t\\N\n")
    assert places(admin) == [(None, None)] * 2
    assert partition.tell() == 100
