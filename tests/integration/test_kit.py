"""The test kit, as a user's tests see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from jobs_lib import App, Discard, Item, Job, Snooze, exponential
from jobs_lib.errors import JobsError, PayloadError
from jobs_lib.schemas.avro import parse_schema
from jobs_lib.settings import load_settings
from jobs_lib.testing import databases as databases_module
from jobs_lib.testing import make_record
from jobs_lib.testing.jobs import Jobs
from jobs_lib.testing.outbox import Outbox
from tests.support.engines import sqlalchemy_url

app = App("shop")
orders = app.topic("orders", compacted=True)
ran: list[Any] = []
OTHER = parse_schema('{"type": "record", "name": "Other", "fields": []}')


@dataclass
class Address:
    town: str


@app.job(group="customer", retry=exponential(first=600, cap=600))
def ship(job: Job, customer: str, order: int, to: Address | None = None) -> None:
    ran.append(("ship", customer, order, job.attempt))
    if customer == "unlucky" and job.attempt < 3:
        raise ConnectionError(f"no answer for order {order}")


@app.job()
def place(job: Job, order: int) -> None:
    with job.transaction() as conn:
        conn.execute("insert into placed values (%s, %s)", (order, job.id))
        orders.send(conn, key=str(order), value={"order": order})
        ship.enqueue(conn, customer="ada", order=order)


@app.job(after=[("payments", "profiles")])
def settle(job: Job, order: int) -> None:
    ran.append(("settle", order))


@app.job()
def remind(job: Job, n: int) -> None:
    ran.append(("remind", n))
    if n == 1:
        with job.transaction() as conn:
            soon = datetime.now(UTC) + timedelta(minutes=30)
            remind.options(run_at=soon).enqueue(conn, n=11)


@app.job(group="customer", last_only=True, debounce=60, retry=exponential(first=600))
def publish(job: Job, customer: str, n: int) -> None:
    ran.append(("publish", n))
    if n == 0:
        raise ConnectionError("the broker does not answer")


@app.job()
async def send_text(job: Job, customer: str) -> None:
    await asyncio.sleep(0)
    ran.append(("text", customer))


@app.consumer("orders", group="tracker")
def track(record, conn) -> None:
    conn.execute("insert into placed values (%s, null)", (record.value["order"],))
    place.enqueue(conn, order=record.value["order"])


@pytest.fixture
def jobs_app() -> App:
    ran.clear()
    return app


@pytest.fixture(scope="session")
def jobs_database_setup():
    def setup(url: str) -> None:
        with psycopg.connect(url) as conn:
            conn.execute("create table placed (n int, job bigint)")

    return setup


@app.entity(orders, source="placed", key="n")
def load_orders(conn: psycopg.Connection, keys: list[str]) -> dict[str, Any]:
    rows = conn.execute(
        "select n from placed where n = any (%s::int[])", ([*map(int, keys)],)
    )
    return {str(n): {"order": n} for (n,) in rows}


def test_a_record_sent_by_its_id_shows_the_current_state(jobs: Jobs, outbox):
    with jobs.transaction() as conn:
        conn.execute("insert into placed values (1, null)")
        for key in ("1", "2"):
            orders.send_current(conn, key=key)
    outbox.assert_sent(orders, key="1", value={"order": 1})
    assert outbox.assert_sent(orders, key="2").value is None


def test_drain_runs_due_jobs_in_order_and_the_jobs_they_enqueue(jobs: Jobs, outbox):
    with jobs.transaction() as conn:
        for order in (1, 2):
            place.enqueue(conn, order=order)
        ship.enqueue(conn, customer="bob", order=9)
    assert jobs.drain() == 5
    assert [entry[1:3] for entry in ran] == [("bob", 9), ("ada", 1), ("ada", 2)]
    assert jobs.enqueued() == []
    with jobs.transaction() as conn:
        assert len(conn.execute("select from placed").fetchall()) == 2
        # As after an executor, no job is left, and the history has it.
        kept = conn.execute("select outcome, attempt from jobs_lib.history").fetchall()
    assert kept == [("completed", 1)] * 5
    outbox.assert_sent(orders, key="2", value={"order": 2})


@pytest.mark.guarantee("J23")
def test_a_job_waits_for_no_gate(jobs: Jobs, outbox):
    with jobs.transaction() as conn:
        settle.enqueue(conn, order=5)
        settle.enqueue_many(conn, [{"order": 6}])
    assert jobs.drain() == 2
    assert sorted(ran) == [("settle", 5), ("settle", 6)]


def test_each_test_has_a_database_of_its_own(jobs: Jobs, outbox):
    assert jobs.enqueued() == []
    assert outbox.sent() == []
    with jobs.transaction() as conn:
        assert conn.execute("select from placed").fetchall() == []


def test_an_error_of_a_handler_reaches_the_test_and_the_job_is_retried(jobs: Jobs):
    with jobs.transaction() as conn:
        ship.enqueue(conn, customer="unlucky", order=1)
        ship.enqueue(conn, customer="unlucky", order=2)
        ship.enqueue(conn, customer="ada", order=3)
    with pytest.raises(ConnectionError, match="no answer for order 1") as raised:
        jobs.drain()
    assert raised.value.__notes__[0].endswith("'ship', attempt 1")
    # Behind a failed job its group waits; the others run.
    assert jobs.drain() == 1
    waiting = jobs.assert_enqueued(ship, order=1)
    assert waiting.attempt == 1
    assert waiting.run_at is not None
    assert jobs.assert_enqueued(ship, order=2).attempt == 0
    assert jobs.drain(include_future=True, raises=False) == 5
    assert [str(error) for error in jobs.errors[1:]] == [
        "no answer for order 1", "no answer for order 2", "no answer for order 2"
    ]  # fmt: skip
    assert ran == [
        ("ship", "unlucky", 1, 1), ("ship", "ada", 3, 1), ("ship", "unlucky", 1, 2),
        ("ship", "unlucky", 1, 3), ("ship", "unlucky", 2, 1),
        ("ship", "unlucky", 2, 2), ("ship", "unlucky", 2, 3),
    ]  # fmt: skip


def test_a_payload_that_does_not_fit_reaches_the_test(jobs: Jobs):
    with jobs.transaction() as conn:
        ship.enqueue(conn, customer="ada", order=1)
        conn.execute("""update jobs_lib.jobs set payload = '{"customer": 7}'""")
    with pytest.raises(Exception, match=r"does not fit the handler ship.*customer"):
        jobs.drain()


def test_a_snooze_and_a_discard_are_no_errors(jobs: Jobs):
    lazy = App("lazy")

    @lazy.job()
    def work(job: Job, discard: bool) -> None:
        raise Discard("of no use") if discard else Snooze(60)

    with type(jobs)(lazy, jobs.url) as lazy_jobs:
        with lazy_jobs.transaction() as conn:
            work.enqueue(conn, discard=True)
            work.enqueue(conn, discard=False)
        assert lazy_jobs.drain() == 2
        assert lazy_jobs.errors == []
        assert lazy_jobs.assert_enqueued(work, discard=False).attempt == 0
        lazy_jobs.assert_not_enqueued(work, discard=True)


@pytest.mark.guarantee("J23")
def test_travel_moves_the_clock_of_scheduled_jobs(jobs: Jobs):
    now = datetime.now(UTC)
    with jobs.transaction() as conn:
        for hours in (3, 1, 2):
            later = remind.options(run_at=now + timedelta(hours=hours))
            later.enqueue(conn, n=hours)
    assert jobs.drain() == 0
    jobs.travel(3_000)
    assert jobs.drain() == 0
    jobs.travel(600)
    assert jobs.drain() == 1
    # Each runs at its time: the job that the first one has enqueued is due before the
    # second.
    assert jobs.drain(until=datetime.now(UTC) + timedelta(minutes=90)) == 2
    assert ran == [("remind", 1), ("remind", 11), ("remind", 2)]
    due = jobs.assert_enqueued(remind, n=3).run_at
    assert due is not None
    assert abs(due - datetime.now(UTC) - timedelta(minutes=30)) < timedelta(minutes=1)
    assert jobs.drain(include_future=True) == 1
    with pytest.raises(ValueError, match="forward only"):
        jobs.travel(-1)


def test_jobs_that_enqueue_jobs_for_ever_are_stopped(jobs: Jobs):
    loop = App("loop")

    @loop.job()
    def again(job: Job) -> None:
        ran.append(job.id)
        with job.transaction() as conn:
            again.enqueue(conn)

    with type(jobs)(loop, jobs.url) as looping:
        with looping.transaction() as conn:
            again.enqueue(conn)
        with pytest.raises(AssertionError, match="20 jobs have run and enqueued are"):
            looping.drain(limit=20)
    assert len(ran) == 20


def test_drain_leaves_paused_jobs_and_unknown_types(jobs: Jobs):
    with jobs.transaction() as conn:
        ship.enqueue(conn, customer="ada", order=1)
        conn.execute("insert into jobs_lib.pauses values ('group', 'ada')")
        conn.execute(
            "insert into jobs_lib.jobs (origin, type, payload)"
            " values ('local/0', 'foreign', '{}')"
        )
    assert jobs.drain() == 0
    with jobs.transaction() as conn:
        conn.execute("delete from jobs_lib.pauses")
    assert jobs.drain() == 1
    assert [one.type for one in jobs.enqueued()] == ["foreign"]


@pytest.mark.guarantee("J23")
def test_assertions_compare_values_as_the_handler_gets_them(jobs: Jobs):
    with jobs.transaction() as conn:
        ship.enqueue(conn, customer="ada", order=1, to=Address("Chur"))
        ship.enqueue(conn, customer="bob", order=2)
    found = jobs.assert_enqueued(ship, to=Address("Chur"))
    assert (found.group, found.payload["order"]) == ("ada", 1)
    jobs.assert_enqueued(ship, customer="bob", to=None)
    jobs.assert_not_enqueued(ship, customer="bob", order=1)
    jobs.assert_not_enqueued(place)
    assert [one.payload["order"] for one in jobs.enqueued(ship)] == [1, 2]


def test_a_failed_assertion_shows_what_there_is(jobs: Jobs, outbox):
    with jobs.transaction() as conn:
        ship.enqueue(conn, customer="ada", order=1)
        conn.execute("insert into placed values (1)")
        orders.send(conn, key="1", value={"order": 1})
    with pytest.raises(AssertionError) as failed:
        jobs.assert_enqueued(ship, order=2)
    assert "no job ship(order=2) is enqueued" in str(failed.value)
    assert "enqueued are\n  ship(customer='ada', order=1, to=None)" in str(failed.value)
    with pytest.raises(AssertionError, match="should be enqueued, but"):
        jobs.assert_not_enqueued(ship)
    # A misspelt field is no reason to hold the row.
    with pytest.raises(PayloadError, match="and no ordr"):
        jobs.assert_not_enqueued(ship, ordr=1)
    with pytest.raises(AssertionError, match=r"sent were\n  orders key='1'"):
        outbox.assert_sent(orders, key="2")
    with pytest.raises(AssertionError, match="nothing should be sent to 'orders'"):
        outbox.assert_not_sent(orders)


@app.consumer("parcels", group="tracker", per="block")
async def track_parcels(records, conn) -> None:
    for record in records:
        await conn.execute("insert into placed values (%s, null)", (record.value,))
        await place.enqueue(conn, order=record.value)
    if records[0].repeated:
        raise KeyError(records[0].key)


def test_an_async_handler_of_blocks_is_called_as_by_a_consumer(jobs: Jobs):
    records = [make_record(n, topic="parcels", offset=n) for n in (7, 8)]
    jobs.handle(track_parcels, records)
    assert [one.payload["order"] for one in jobs.enqueued(place)] == [7, 8]
    with jobs.connect() as conn:
        assert conn.execute("select n from placed order by n").fetchall() == [
            (7,),
            (8,),
        ]
    with pytest.raises(KeyError):
        jobs.handle(track_parcels, [make_record(9, key=9, repeated=True)])
    assert len(jobs.enqueued(place)) == 2


def test_an_async_handler_cannot_commit_in_the_kit_either(jobs: Jobs):
    async def handle(record, conn) -> None:
        await conn.commit()

    with pytest.raises(JobsError, match="jobs_lib ends it"):
        jobs.handle(handle, make_record(1))


def test_records_are_handled_without_a_broker(jobs: Jobs, outbox):
    jobs.handle(track, make_record({"order": 5}, topic="orders", partition=3))
    jobs.assert_enqueued(place, order=5)
    assert jobs.drain() == 2
    sent = outbox.assert_sent("orders", value={"order": 5})
    assert sent.key == "5"
    outbox.assert_not_sent("orders", key="6")
    with pytest.raises(KeyError):
        jobs.handle(track, make_record({}))


def test_inline_runs_a_job_in_the_transaction_that_enqueues_it(jobs: Jobs):
    conn = jobs.connect()
    with jobs.inline():
        place.enqueue(conn, order=1)
        # The jobs are chained, and nothing is committed yet.
        assert ran == [("ship", "ada", 1, 1)]
        assert jobs.enqueued() == []
        later = datetime.now(UTC) + timedelta(hours=1)
        ship.options(run_at=later).enqueue(conn, customer="bob", order=2)
        ship.enqueue_many(conn, [{"customer": "eve", "order": n} for n in (3, 4)])
    conn.commit()
    assert [entry[2] for entry in ran] == [1, 3, 4]
    assert [one.payload["order"] for one in jobs.enqueued()] == [2]
    assert len(conn.execute("select from placed").fetchall()) == 1
    conn.rollback()
    with jobs.inline(), pytest.raises(ConnectionError):
        ship.enqueue(conn, customer="unlucky", order=7)
    conn.rollback()
    # Outside the block all is as before.
    ship.enqueue(conn, customer="ada", order=8)
    conn.commit()
    assert len(jobs.enqueued()) == 2


@app.job()
async def mail(job: Job, to: str) -> None:
    ran.append(("mail", to))


@app.batch(size=10)
def index(items: list[Item[str]]) -> None:
    for item in items:
        if item.payload == "broken":
            item.fail(ValueError("broken"))
        elif item.payload == "later":
            item.fail(Snooze(60))


@app.job()
def forgets_to_await(job: Job) -> Any:
    async def work() -> None: ...

    return work()


def test_inline_refuses_an_async_handler_and_names_drain(jobs: Jobs):
    with jobs.transaction() as conn, jobs.inline():
        later = datetime.now(UTC) + timedelta(hours=1)
        mail.options(run_at=later).enqueue(conn, to="eve")
        with (
            pytest.raises(JobsError, match=r"of 'mail' is async: use drain\(\)"),
            conn.transaction(),
        ):
            mail.enqueue(conn, to="ada")
    assert [one.payload for one in jobs.enqueued(mail)] == [{"to": "eve"}]
    assert jobs.drain(include_future=True) == 1
    assert ran == [("mail", "eve")]


def test_inline_raises_the_error_with_which_an_item_of_a_batch_fails(jobs: Jobs):
    with jobs.transaction() as conn, jobs.inline():
        index.enqueue(conn, "sound")
        index.enqueue(conn, "later")
        with pytest.raises(ValueError, match="broken"), conn.transaction():
            index.enqueue(conn, "broken")
    assert [one.payload for one in jobs.enqueued()] == [{"payload": "later"}]


def test_the_kit_fails_a_handler_that_returns_work_as_an_executor_does(jobs: Jobs):
    with (
        jobs.transaction() as conn,
        jobs.inline(),
        pytest.raises(JobsError, match="never awaited"),
        conn.transaction(),
    ):
        forgets_to_await.enqueue(conn)
    with jobs.transaction() as conn:
        forgets_to_await.enqueue(conn)
    with pytest.raises(JobsError, match="never awaited"):
        jobs.drain()


def test_the_kit_works_with_the_users_own_engine(jobs: Jobs):
    engine = create_engine(sqlalchemy_url(jobs.url))
    with Session(engine) as session, jobs.inline():
        place.enqueue(session, order=1)
        session.commit()
    with engine.begin() as connection:
        place.enqueue(connection, order=2)
    engine.dispose()
    assert jobs.drain() == 2
    assert [entry[2] for entry in ran] == [1, 2]


@pytest.mark.parametrize("first", ["publish", "ship"])
def test_drain_runs_only_the_newest_job_of_a_last_only_type(jobs: Jobs, first):
    with jobs.transaction() as conn:
        for n in range(1, 5):
            if first == "ship":
                ship.enqueue(conn, customer="ada", order=n)
            publish.enqueue(conn, customer="ada", n=n)
            if first == "publish":
                ship.enqueue(conn, customer="ada", order=n)
    assert jobs.drain() == 5
    assert [one[0] for one in ran].count("publish") == 1
    assert ran[4 if first == "ship" else 3] == ("publish", 4)
    with jobs.connect() as conn:
        ends = conn.execute(
            "select outcome, count(*) from jobs_lib.history group by 1 order by 1"
        ).fetchall()
    assert ends == [("completed", 5), ("superseded", 3)]


def test_a_failed_last_only_job_gives_way_to_a_newer_one_in_drain(jobs: Jobs):
    with jobs.transaction() as conn:
        publish.enqueue(conn, customer="ada", n=0)
    assert jobs.drain(raises=False) == 1
    assert jobs.drain() == 0
    with jobs.transaction() as conn:
        publish.enqueue(conn, customer="ada", n=1)
    assert jobs.drain() == 1
    assert ran == [("publish", 0), ("publish", 1)]
    assert jobs.enqueued() == []


def test_a_failed_job_is_retried_without_moving_the_clock(jobs):
    with jobs.transaction() as conn:
        first = ship.enqueue(conn, customer="unlucky", order=7)
    for attempt in (1, 2):
        jobs.drain(raises=False)
        assert jobs.assert_enqueued(ship).attempt == attempt
        assert jobs.retry() == 1
    assert jobs.drain() == 1
    assert [one[-1] for one in ran] == [1, 2, 3]
    with pytest.raises(AssertionError, match=rf"job {first}: completed at"):
        jobs.retry(first)


def test_a_record_has_the_version_that_it_is_given():
    assert make_record(1, version=7).version == 7
    assert make_record(1).version is None
    assert make_record(1, headers={"ce_version": "9"}, version=7).version == 9


def test_the_kit_drops_a_database_despite_open_connections(
    jobs_server_url, monkeypatch
):
    monkeypatch.setattr(databases_module, "migrate", lambda *_: None)
    opened = []

    def setup(url: str) -> None:
        opened.append(psycopg.connect(url))

    with databases_module.Databases(jobs_server_url) as databases:
        with databases.fresh(setup) as first:
            opened.append(psycopg.connect(first))
        with databases.fresh(setup) as second:
            assert second != first
    for connection in opened:
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select")
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(jobs_server_url, dbname=connection.info.dbname)


@pytest.mark.parametrize("time", ["first", "again"])
def test_the_apps_own_pool_has_the_database_of_each_test(jobs, time):
    with app.transaction() as conn:
        assert conn.info.dbname == psycopg.conninfo.conninfo_to_dict(jobs.url)["dbname"]
        ship.enqueue(conn, customer="ada", order=1)
    assert len(jobs.enqueued(ship)) == 1


def test_the_kits_schema_registry_ends_with_the_test(jobs_database_url):
    shop = App("shop", settings=load_settings(schema_registry_url="mock://outside"))
    fields = [{"name": "id", "type": "long"}]
    schema = {"type": "record", "name": "Order", "fields": fields}
    sold = shop.topic("sold", schema=schema)
    encoder: Any = sold.encoder
    shop.registry().register(encoder.subject, encoder.schema)
    outside, encoded = shop.registry(), sold.encode({"id": 1})
    with Jobs(shop, jobs_database_url) as kit, kit.transaction() as conn:
        assert shop.registry() is not outside
        shop.registry().register("others", OTHER)
        shop.registry().register(encoder.subject, encoder.schema)
        sold.send(conn, key="1", value={"id": 1})
        assert sold.encode({"id": 1}) != encoded
    assert sold.encode({"id": 1}) == encoded


@pytest.mark.parametrize(
    "given",
    [{"schema_name": "shop_jobs"}, {"environment": "dev"}],
    ids=["schema", "environment"],
)
def test_an_app_that_was_given_its_settings_finds_its_tables(jobs_database_url, given):
    shop = App("shop", settings=load_settings(**given))
    sold = shop.topic("sold")

    @shop.job()
    def work(job: Job) -> None: ...

    with Jobs(shop, jobs_database_url) as kit:
        with kit.transaction() as conn:
            work.enqueue(conn)
            sold.send(conn, key="1", value={"id": 1})
        assert len(kit.enqueued(work)) == len(Outbox(kit).sent(sold)) == 1


def test_async_handlers_run_in_plain_and_in_async_tests(jobs):
    async def test() -> None:
        jobs.drain()

    for customer in ("ada", "bob"):
        with jobs.transaction() as conn:
            send_text.enqueue(conn, customer=customer)
        if customer == "ada":
            jobs.drain()
        else:
            asyncio.run(test())
    assert ran == [("text", "ada"), ("text", "bob")]
