"""A standby takes over without the last commits; the pods live on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.apps import HOME, count_unsent, executing, heard, make_app, running
from tests.support.records import produce, read_topic
from tests.support.standby import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import Job

KEYS = 20
"""The keys of records; each of these is written several times."""
GROUPS = ["a", "b", "c", "d"]
pytestmark = pytest.mark.expects("loop.failed", "jobs.fenced", "origins.lost")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two servers that only this test uses."""
    with Pair() as pair:
        pair.ask("create table effects (at bigserial, g text, n int)")
        yield pair


@pytest.mark.guarantee("FP7", "I9")
@pytest.mark.parametrize(
    "own", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["own", "plain"]
)
def test_groups_keep_their_order_when_the_last_commits_are_lost(pair, wait_for, own):
    app = make_app(pair.url)
    begun, first, go = (threading.Event() for _ in range(3))
    reached: list[str] = []
    runs: list[tuple[str, int]] = []

    @app.job(group=lambda g, n: g)
    def work(job: Job, g: str, n: int) -> None:
        if n == 0 and not first.is_set():
            begun.set()
            first.wait(60)
        if n == 5 and not go.is_set():
            reached.append(g)
            go.wait(60)
        if own:
            with job.transaction() as connection:
                connection.execute("insert into effects (g, n) values (%s, %s)", (g, n))
        runs.append((g, n))

    with psycopg.connect(pair.url) as connection:
        payloads = [{"g": g, "n": n} for n in range(10) for g in GROUPS]
        work.enqueue_many(connection, payloads)
    with executing(app, HOME, workers=8):
        assert begun.wait(30)
        pair.cut_replication()
        first.set()
        wait_for(
            lambda: len(reached) == len(GROUPS),
            timeout=30,
            what="all are at their fifth",
        )
        wait_for(
            lambda: pair.ask("select count(*) from jobs_lib.jobs") == [(20,)],
            timeout=30,
            what="what has ended is written",
        )
        assert pair.fail_over("select count(*) from jobs_lib.jobs") == [(40,)]
        go.set()
        wait_for(
            lambda: pair.ask("select count(*) from jobs_lib.jobs") == [(0,)],
            timeout=30,
            what=lambda: f"all have run again: {runs}",
        )
    for group in GROUPS:
        effects = pair.ask("select n from effects where g = %s order by at", group)
        if own:
            assert effects == [(n,) for n in range(10)]
        # The last run of each group comes after all its earlier runs.
        assert [n for g, n in runs if g == group][-10:] == [*range(10)]


def check_order(key: int, numbers: list[int]) -> None:
    """Check the order of a key's records; a failover comes after the number 100."""
    every = [*range(key, 201, KEYS)]
    # Rows that are back are sent again, before rows that were committed after them.
    before = [n for n in every if n <= 100]
    after = [n for n in every if n == key or n > 100]
    assert numbers[: len(before)] == before
    # A block may come twice: the last record that a consumer sees counts.
    last = [*dict.fromkeys(numbers[: len(before) - 1 : -1])][::-1]
    assert last == after


@pytest.mark.guarantee("FP7", "J7", "I20")
def test_no_key_of_a_job_or_record_is_given_twice_and_records_keep_their_order(
    pair, bootstrap_servers, topic, wait_for
):
    app = make_app(pair.url, kafka_bootstrap_servers=bootstrap_servers)
    keys: dict[str, set[int]] = {}
    ids: dict[int, set[int]] = {}

    @app.job()
    def pay(job: Job, n: int) -> None:
        # Two external systems recognize repeats by these keys.
        keys.setdefault(job.idempotency_key, set()).add(n)
        ids.setdefault(job.id, set()).add(n)

    paid = app.topic(topic(1), value=dict[str, int])

    def write(numbers: range) -> None:
        # The transactions are small, so that the standby has no reserve of higher ids.
        with psycopg.connect(pair.url, autocommit=True) as connection:
            for n in numbers:
                with connection.transaction():
                    pay.enqueue(connection, n=n)
                    paid.send(connection, key=str(n % KEYS), value={"n": n})

    def wait_until_done(numbers: range) -> None:
        def is_done() -> bool:
            with psycopg.connect(pair.url, autocommit=True) as connection:
                return (
                    set().union(*keys.values()) >= {*numbers}
                    and count_unsent(connection) == (0, 0)
                )  # fmt: skip

        wait_for(is_done, timeout=40, what=lambda: f"all is paid: {len(keys)}")

    # The standby has these jobs, and never learns that they are done.
    write(range(KEYS))
    pair.cut_replication()
    with running(app, "executor", "relay"):
        wait_until_done(range(KEYS))
        write(range(KEYS, 101))
        wait_until_done(range(101))
        pair.fail_over()
        write(range(101, 201))
        wait_until_done(range(201))
    assert any(len(numbers) > 1 for numbers in ids.values()), "no id was given twice"
    assert [numbers for numbers in keys.values() if len(numbers) > 1] == []
    records = read_topic(bootstrap_servers, paid.name)
    sent: dict[str, set[int]] = {}
    of_keys: dict[str, list[int]] = {}
    for record in records:
        n = record.json["n"]
        sent.setdefault(record.headers["ce_id"], set()).add(n)
        of_keys.setdefault(record.key, []).append(n)
    assert [numbers for numbers in sent.values() if len(numbers) > 1] == []
    assert set().union(*sent.values()) == {*range(201)}
    for key, numbers in of_keys.items():
        check_order(int(key), numbers)


@pytest.mark.guarantee("FP7")
def test_a_server_that_turns_read_only_for_a_while_ends_no_process(
    database_url, bootstrap_servers, topic, connect, wait_for
):
    admin = connect(autocommit=True)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    ran: list[int] = []

    @app.job()
    def work(job: Job, n: int) -> None:
        ran.append(n)

    told = app.topic(topic(1), value=int)
    name = psycopg.sql.Identifier(admin.info.dbname)

    def turn(state: str) -> None:
        admin.execute("set default_transaction_read_only = off")
        admin.execute(
            psycopg.sql.SQL(
                "alter database {} set default_transaction_read_only = {}"
            ).format(name, psycopg.sql.SQL(state))
        )
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )

    with running(app, "executor", "relay"), heard("loop.failed") as events:
        turn("on")
        # Both must write to take their origins again, whether they had them or not.
        admin.execute("update jobs_lib.origins set owner = null, epoch = epoch + 1")

        def refused() -> set[str]:
            return {
                fields["loop"] for _, fields in events
                if fields["sqlstate"] == "25006"
            }  # fmt: skip

        wait_for(
            lambda: {"heartbeat", "own execute", "own relay"} <= refused(),
            timeout=30,
            what=lambda: f"all have met it: {refused()}",
        )
        turn("off")
        with admin.transaction():
            work.enqueue(admin, n=1)
            told.send(admin, key="a", value=1)
        wait_for(lambda: ran == [1], timeout=30, what="jobs run")
        wait_for(
            lambda: count_unsent(admin) == (0, 0), timeout=30, what="the row has left"
        )


@pytest.mark.guarantee("FP7", "I24")
def test_a_consumer_applies_again_what_a_promoted_standby_has_lost(
    pair, bootstrap_servers, topic, wait_for
):
    app = make_app(
        pair.url,
        kafka_bootstrap_servers=bootstrap_servers,
        heartbeat_interval=0.5,
        stale_after=5.0,
    )
    name = topic(1)
    pair.ask("create table model_rm (id text primary key, version bigint, n int)")

    @app.consumer(name, group="handler")
    def handle(record, conn) -> None:
        conn.execute("insert into effects (g, n) values ('g', %s)", (record.value,))

    @app.read_model(name, group="model", table="model_rm", key="id")
    def model(record):
        return {"n": record.value}

    def send(numbers: range) -> None:
        produce(bootstrap_servers, name, [(f"k{n % KEYS}", n) for n in numbers])

    def await_read(count: int) -> None:
        query = "select next_offset from jobs_lib.offsets"
        wait_for(
            lambda: pair.ask(query) == [(count,), (count,)],
            timeout=60,
            what=lambda: f"{count} are in: {pair.ask(query)}",
        )

    send(range(40))
    with heard("offset.moved") as moved, running(app, "consumers"):
        await_read(40)
        pair.cut_replication()
        send(range(40, 80))
        await_read(80)
        assert pair.fail_over("select count(*) from effects") == [(40,)]
        # Of its own accord, without another record.
        await_read(80)
        send(range(80, 100))
        await_read(100)
    assert {(f["before"], f["next_offset"]) for _, f in moved} == {(80, 40)}
    effects = pair.ask("select n from effects order by at")
    assert effects == [(n,) for n in range(100)]
    rows = pair.ask("select id, n from model_rm")
    assert sorted(rows) == sorted((f"k{n % KEYS}", n) for n in range(80, 100))
