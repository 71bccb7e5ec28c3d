"""Another topic becomes the home: a group's jobs stay in one origin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.errors import TopicError
from jobs_lib.operating.discarded import retry_discarded
from jobs_lib.partitioner import choose_origin
from jobs_lib.topics import declare_topic
from tests.operating.helpers import add_discarded
from tests.support.apps import count, make_app

if TYPE_CHECKING:
    from jobs_lib import App, Job

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 12
MOVED = choose_origin("g", "orders", PARTITIONS)


def make_pod(url: str) -> tuple[App, Any]:
    app = make_app(url)

    @app.job(name="work", group="group")
    def work(job: Job, group: str) -> None: ...

    return app, work


def origins(admin) -> set[str]:
    return {o for (o,) in admin.execute("select origin from jobs_lib.jobs")}


def count_waiting(admin) -> int:
    """How many sessions wait for an advisory lock."""
    return admin.execute(
        "select from pg_locks where locktype = 'advisory' and not granted"
    ).rowcount


@pytest.fixture
def pods(database_url, connect, admin):
    """Two pods: the first knows the home as it was before."""
    (app, knows_old), (_, knows_new) = (make_pod(database_url) for _ in range(2))
    with connect() as connection:
        knows_old.enqueue(connection, group="g")
    admin.execute("delete from jobs_lib.jobs")
    return app, knows_old, knows_new


@pytest.mark.guarantee("S9", "S21")
@pytest.mark.parametrize("partitions", [PARTITIONS, 16])
def test_who_knows_the_old_home_enqueues_into_the_new_one(
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
def test_many_jobs_by_who_knows_the_old_home_lie_in_the_new_one(pods, admin, connect):
    app, knows_old, _ = pods
    # As many partitions as before: the number alone does not tell.
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
    retry_discarded(database)
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
        retrying = threads.submit(retry_discarded, database, [job])
        wait_for(lambda: count_waiting(admin) == 2, what="the retry waits")
        opened.rollback()
        moving.result(timeout=30)
        assert retrying.result(timeout=30).retried == 1
    assert origins(admin) == {MOVED}
