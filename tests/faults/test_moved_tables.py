"""The tables move to another server: a dump is restored there."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.operating import cancel
from jobs_lib.postgres.database import Database
from jobs_lib.testing.databases import embedded_server
from tests.support.apps import count, count_unsent, executing, make_app, running
from tests.support.records import read_topic

if TYPE_CHECKING:
    from jobs_lib import App

pytestmark = pytest.mark.expects("fenced")

_IDS_AHEAD = 2_000


@dataclass
class Item:
    """The state of an item."""

    id: int


@pytest.fixture(scope="module")
def other_server():
    """A server that has given out far fewer transaction ids than the tests' own."""
    with embedded_server() as server:
        yield server


def spend_transaction_ids(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"do $$ begin for n in 1..{_IDS_AHEAD} loop"
            " perform pg_current_xact_id(); commit; end loop; end $$"
        )


def next_transaction(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


def move(server, url: str, other) -> str:
    """Restore the database at ``url`` on another server; return its URL there."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PG")}
    dump = subprocess.run(
        [server._binary("pg_dump"), url],
        check=True, capture_output=True, env=environment,
    ).stdout  # fmt: skip
    subprocess.run(
        [other._binary("psql"), "-q", "-v", "ON_ERROR_STOP=1", other.url],
        check=True, capture_output=True, env=environment, input=dump,
    )  # fmt: skip
    return other.url


def make_shop(url: str, kafka: str, topic: str, ran: list[int]) -> App:
    app = make_app(url, kafka_bootstrap_servers=kafka)
    items = app.topic(topic, value=Item)

    @app.entity(items, source="items", key="id")
    def load_items(connection, keys: list[str]) -> dict[str, Item]:
        return {key: Item(int(key)) for key in keys}

    @app.job(group=lambda n: f"g{n % 5}")
    def work(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects (n) values (%s)", (n,))
        ran.append(n)

    return app


@pytest.mark.guarantee("FP21")
def test_jobs_and_records_go_on_after_the_tables_are_restored_from_a_dump(
    postgres_server, other_server, database_url, bootstrap_servers, topic, wait_for
):
    spend_transaction_ids(database_url)
    name = topic(2)
    ran: list[int] = []
    app = make_shop(database_url, bootstrap_servers, name, ran)
    old = Database(database_url)
    with psycopg.connect(database_url) as connection:
        connection.execute("create table effects (at serial, n int)")
        connection.execute("create table items (id int primary key)")
        connection.execute("insert into items select generate_series(1, 300)")
        app.jobs["work"].enqueue_many(connection, [{"n": n} for n in range(100)])
        app.topics[name].send(connection, key="live", value=Item(0))
    # One job of each origin, so that each origin has a mark of this server.
    with psycopg.connect(database_url) as connection:
        last = connection.execute(
            "select distinct on (origin) origin, id, (payload ->> 'n')::int"
            " from jobs_lib.jobs order by origin, id desc"
        ).fetchall()
    cancelled = {n for _, _, n in last}
    assert set(cancel(old, [job for _, job, _ in last]).values()) == {"cancelled"}
    reexport.start(old, app.entities["items"], rate=60_000)

    url = move(postgres_server, database_url, other_server)
    assert next_transaction(url) < next_transaction(database_url) - _IDS_AHEAD // 2
    app = make_shop(url, bootstrap_servers, name, ran)
    new = Database(url)
    admin = psycopg.connect(url, autocommit=True)
    with admin, running(app, "executor", "relay"):
        wait_for(
            lambda: (count(admin, "jobs"), count_unsent(admin)) == (0, (0, 0)),
            timeout=30,
            what=lambda: f"all ran and left: {count(admin, 'jobs')}",
        )
        wait_for(lambda: reexport.status(new, "items").state == "finished", timeout=30)
        with admin.transaction():
            late = app.jobs["work"].options(origin=last[0][0]).enqueue(admin, n=100)
        wait_for(lambda: 100 in ran, what="an origin with a mark takes new jobs")
        assert cancel(new, [late]) == {late: "missing"}
    assert sorted(ran) == sorted({*range(101)} - cancelled)
    sent = {record.key for record in read_topic(bootstrap_servers, name)}
    assert sent == {"live", *map(str, range(1, 301))}


@pytest.mark.guarantee("FP21")
def test_jobs_of_an_origin_marked_by_another_server_are_claimed(
    database_url, connect, wait_for
):
    admin = connect(autocommit=True)
    app = make_app(database_url)
    ran: list[int] = []

    @app.job()
    def work(job, n: int) -> None:
        ran.append(n)

    with admin.transaction():
        gone, _ = (work.options(origin="local/3").enqueue(admin, n=n) for n in range(2))
    assert cancel(Database(database_url), [gone]) == {gone: "cancelled"}
    admin.execute("update jobs_lib.origins set changed_by = 4611686018427387904")
    with executing(app, ["local/3"]):
        wait_for(lambda: ran == [1], what="the other one runs")
