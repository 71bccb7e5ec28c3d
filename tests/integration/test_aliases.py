"""A renamed type runs the jobs that wait under its earlier names."""

from __future__ import annotations

import pytest

from jobs_lib import Item, Job, Rate
from jobs_lib.testing import Jobs
from tests.support.apps import HOME, count, executing, make_app


@pytest.fixture
def before(database_url):
    """The release before this one: its types are `charge` and `pack`."""
    app = make_app(database_url)

    @app.job(group="customer")
    def charge(job: Job, customer: str, order: int) -> None: ...

    @app.batch()
    def pack(items: list[Item[int]]) -> None: ...

    with app.transaction() as conn:
        for order in (1, 2):
            charge.enqueue(conn, customer="ada", order=order)
        pack.enqueue_many(conn, [{"payload": 7}, {"payload": 8}])
    app.close()
    return app


def test_jobs_of_an_alias_run_by_the_handler_in_the_order_of_their_group(
    before, database_url, admin, wait_for
):
    app = make_app(database_url)
    ran: list[tuple[str, int]] = []
    packed: list[int] = []

    @app.job(name="charge_card", aliases=["bill", "charge"], group="customer")
    def charge_card(job: Job, customer: str, order: int) -> None:
        ran.append((job.type, order))

    @app.batch(name="wrap", aliases=["pack"])
    def wrap(items: list[Item[int]]) -> None:
        packed.extend(item.payload for item in items)

    with app.transaction() as conn:
        charge_card.enqueue(conn, customer="ada", order=3)
    app.close()
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 5, what="all ran")
    assert ran == [("charge", 1), ("charge", 2), ("charge_card", 3)]
    assert sorted(packed) == [7, 8]


def test_the_kit_drains_jobs_of_an_alias(before, database_url):
    app = make_app(database_url)
    ran: list[int] = []

    @app.job(aliases=["charge"], group="customer")
    def charge_card(job: Job, customer: str, order: int) -> None:
        ran.append(order)

    with Jobs(app, database_url) as jobs:
        assert jobs.drain() == 2
    assert ran == [1, 2]


def test_a_rate_over_all_pods_counts_the_jobs_of_an_alias_as_its_own(
    database_url, admin, wait_for
):
    app = make_app(database_url)

    @app.job(name="charge_card", aliases=["charge"], rate=Rate(1, per=3_600))
    def charge_card(job: Job) -> None: ...

    # The jobs have no group: behind one that is put off, the next would not even be
    # asked.
    for origin in HOME[::4]:
        admin.execute("select jobs_lib.enqueue('charge', origin => %s)", (origin,))
        charge_card.options(origin=origin).enqueue(app)
    app.close()
    with executing(app, HOME[:8]), executing(app, HOME[8:]):
        wait_for(
            lambda: count_put_off(admin) + count(admin, "history") == 8,
            what="each job has started or is put off",
        )
    # Only one of all runs, whatever name it waits under.
    assert count(admin, "history") == 1


def count_put_off(admin):
    query = "select count(*) from jobs_lib.jobs where state = 'scheduled'"
    return admin.execute(query).fetchone()[0]
