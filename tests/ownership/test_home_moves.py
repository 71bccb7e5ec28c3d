"""Another topic becomes the home: the jobs of a group stay in one origin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.errors import TopicError
from jobs_lib.operating import retry
from jobs_lib.operating.home_topic import declare_topic, repartition
from jobs_lib.partitioner import choose_origin
from tests.operating.helpers import add_discarded
from tests.support.apps import count, make_app, running

if TYPE_CHECKING:
    from jobs_lib import App, Job

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 12
MOVED = choose_origin("g", "orders", PARTITIONS)


def make_pod(url: str) -> tuple[App, Any]:
    app = make_app(url)

    @app.job(name="work", group="group")
    def work(job: Job, group: str | None) -> None: ...

    return app, work


def origins(admin) -> set[str]:
    return {o for (o,) in admin.execute("select origin from jobs_lib.jobs")}


def count_waiting(admin) -> int:
    """Count the sessions that wait for an advisory lock."""
    return admin.execute(
        "select from pg_locks where locktype = 'advisory' and not granted"
    ).rowcount


@pytest.fixture
def pods(database_url, connect, admin):
    """Two pods; the first one knows the old home."""
    (app, knows_old), (_, knows_new) = (make_pod(database_url) for _ in range(2))
    with connect() as connection:
        knows_old.enqueue(connection, group="g")
    admin.execute("delete from jobs_lib.jobs")
    return app, knows_old, knows_new


@pytest.mark.guarantee("S9", "S21")
@pytest.mark.parametrize("partitions", [PARTITIONS, 16])
def test_a_program_that_knows_the_old_home_enqueues_into_the_new_one(
    pods, admin, connect, partitions
):
    app, knows_old, knows_new = pods
    declare_topic(app, "orders", home=True, partitions=partitions)
    with connect() as connection:
        knows_old.enqueue(connection, group="g")
        knows_new.enqueue(connection, group="g")
        connection.execute(
            "select jobs_lib.enqueue('work', '{\"group\": \"g\"}', \"group\" => 'g')"
        )
    assert count(admin, "jobs") == 3
    assert origins(admin) == {choose_origin("g", "orders", partitions)}


def test_the_hint_names_the_origin_in_which_the_job_lies(pods, admin, connect):
    app, knows_old, _ = pods
    declare_topic(app, "orders", home=True, partitions=PARTITIONS)
    admin.execute('listen "jobs_lib.jobs"')
    with connect() as connection:
        knows_old.enqueue(connection, group="g")
    hints = [one.payload for one in admin.notifies(timeout=10, stop_after=1)]
    assert hints == [MOVED]


@pytest.mark.guarantee("S9")
def test_enqueue_many_by_a_program_that_knows_the_old_home_uses_the_new_one(
    pods, admin, connect
):
    app, knows_old, _ = pods
    # The new home has as many partitions as the old one: the number does not show it.
    declare_topic(app, "orders", home=True, partitions=16)
    with connect() as connection:
        knows_old.enqueue_many(connection, [{"group": "g"}] * 3)
    assert origins(admin) == {choose_origin("g", "orders", 16)}


@pytest.mark.guarantee("S9")
def test_the_home_does_not_move_under_an_open_transaction(
    pods, admin, connect, wait_for
):
    app, knows_old, _ = pods
    opened = connect()
    knows_old.enqueue(opened, group="g")
    with pytest.raises(TopicError, match=r"stayed open for more than 0\.2 s"):
        declare_topic(app, "orders", home=True, partitions=PARTITIONS, wait=0.2)
    with ThreadPoolExecutor() as threads:
        moving = threads.submit(
            declare_topic, app, "orders", home=True, partitions=PARTITIONS
        )
        wait_for(lambda: count_waiting(admin), what="it waits")
        opened.commit()
        with pytest.raises(TopicError, match="while jobs wait"):
            moving.result(timeout=30)
    assert origins(admin) == {choose_origin("g", "local", 16)}


@pytest.mark.parametrize("partitions", [PARTITIONS, 16])
def test_a_home_is_adopted_while_jobs_wait_and_their_groups_move(
    pods, admin, connect, partitions
):
    app, knows_old, _ = pods
    next_month = datetime.now(UTC) + timedelta(days=31)
    with connect() as connection:
        later = knows_old.options(run_at=next_month).enqueue(connection, group="g")
        many = [knows_old.enqueue(connection, group=f"g{n}") for n in range(30)]
        by_hand = knows_old.options(origin="local/3").enqueue(connection, group="own")
        free = knows_old.options(origin="local/5").enqueue(connection, group=None)
    assert choose_origin("own", "local", 16) != "local/3"
    with pytest.raises(TopicError, match="jobs-lib topics declare MODULE:APP orders"):
        declare_topic(app, "orders", home=True, partitions=partitions)
    moved = declare_topic(app, "orders", home=True, move=True, partitions=partitions)
    assert moved == 31
    expected = {
        job: choose_origin(f"g{n}", "orders", partitions) for n, job in enumerate(many)
    }
    expected |= {later: choose_origin("g", "orders", partitions)}
    expected |= {by_hand: "local/3", free: "local/5"}
    assert dict(admin.execute("select id, origin from jobs_lib.jobs")) == expected
    # A pod of the last release enqueues behind them.
    with connect() as connection:
        knows_old.enqueue(connection, group="g")
    assert count(admin, "jobs") == 34
    assert origins(admin) == {*expected.values()}
    assert declare_topic(app, "orders", home=True, move=True) == 0


@pytest.mark.guarantee("S9")
def test_groups_stay_in_order_while_their_home_is_adopted(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)
    admin.execute('create table effects (place serial, "group" text, n int)')

    @app.job(name="work", group="group")
    def work(job: Job, group: str, n: int) -> None:
        with job.transaction() as own:
            own.execute("insert into effects values (default, %s, %s)", (group, n))

    # A pod without consumers shares all origins that have jobs, of any topic.
    with running(app, "executor"), connect() as connection:
        for n in range(60):
            for group in "abc":
                work.enqueue(connection, group=group, n=n)
            connection.commit()
            if n == 30:
                declare_topic(app, "orders", home=True, move=True, partitions=12)
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    for group in "abc":
        rows = admin.execute(
            'select n from effects where "group" = %s order by place', (group,)
        )
        assert [n for (n,) in rows] == [*range(60)]


def test_jobs_that_stay_in_the_old_home_run_after_the_move(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)

    @app.job(name="work", group="group")
    def work(job: Job, group: str | None) -> None: ...

    with connect() as connection:
        work.enqueue_many(connection, [{"group": None}] * 5)
        work.options(origin="local/3").enqueue(connection, group="own")
    declare_topic(app, "orders", home=True, move=True, partitions=PARTITIONS)
    assert {one.split("/")[0] for one in origins(admin)} == {"local"}
    with running(app, "executor"):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")


@pytest.mark.guarantee("S9", "S21")
@pytest.mark.parametrize("change", ["home", "repartition"])
def test_an_executor_of_all_origins_gets_the_new_ones_without_a_restart(
    database_url, admin, connect, wait_for, change
):
    app = make_app(database_url, origins="all")

    @app.job(name="work", group="group")
    def work(job: Job, group: str) -> None: ...

    def enqueue() -> None:
        with connect() as connection:
            work.enqueue_many(connection, [{"group": f"g{n}"} for n in range(40)])

    with running(app, "executor"):
        enqueue()
        wait_for(lambda: count(admin, "jobs") == 0, what="all of the old home ran")
        if change == "home":
            declare_topic(app, "orders", home=True, move=True, partitions=PARTITIONS)
        else:
            repartition(app, 24)
        enqueue()
        wait_for(lambda: count(admin, "jobs") == 0, what="all of the new home ran")


@pytest.mark.guarantee("S9")
@pytest.mark.parametrize("partitions", [PARTITIONS, 16])
def test_a_job_retried_after_the_move_lies_with_its_group(
    pods, database, admin, connect, partitions
):
    app, _, knows_new = pods
    by_hash = add_discarded(admin, group="g", origin=choose_origin("g", "local", 16))
    by_hand = add_discarded(admin, group="g", origin="local/0")
    without_group = add_discarded(admin, origin="local/1")
    declare_topic(app, "orders", home=True, partitions=partitions)
    retry(database)
    with connect() as connection:
        new = knows_new.enqueue(connection, group="g")
    moved = choose_origin("g", "orders", partitions)
    assert choose_origin("g", "local", 16) != "local/0"
    assert dict(admin.execute("select id, origin from jobs_lib.jobs").fetchall()) == {
        by_hash: moved,
        by_hand: "local/0",
        without_group: "local/1",
        new: moved,
    }


@pytest.mark.guarantee("S9")
def test_a_retry_waits_for_a_move_of_the_home(pods, database, admin, connect, wait_for):
    app, knows_old, _ = pods
    job = add_discarded(admin, group="g", origin=choose_origin("g", "local", 16))
    opened = connect()
    knows_old.enqueue(opened, group="g")
    with ThreadPoolExecutor() as threads:
        moving = threads.submit(
            declare_topic, app, "orders", home=True, partitions=PARTITIONS
        )
        wait_for(lambda: count_waiting(admin) == 1, what="the move waits")
        retrying = threads.submit(retry, database, [job])
        wait_for(lambda: count_waiting(admin) == 2, what="the retry waits")
        opened.rollback()
        moving.result(timeout=30)
        assert retrying.result(timeout=30).retried == 1
    assert origins(admin) == {MOVED}
