"""What read models tell: each change once, and nothing where nothing has changed."""

from __future__ import annotations

import json
import threading
from typing import Any, cast

import pytest

from jobs_lib import ConfigurationError
from tests.support.apps import count, heard, make_app, running
from tests.support.records import make_producer

LIVE, REEXPORT = "live", "reexport"
Sent = tuple[str, "int | None", "int | None", str]
"""(key, version if any, n or None for an end, cause)"""


def read(admin, table: str) -> list[Any]:
    """All rows of a table of the test."""
    return admin.execute(f"select * from {table}").fetchall()


@pytest.fixture
def send(bootstrap_servers, topic):
    """A function that sends records to the test's topic, and returns its name."""
    name = topic(1)

    def send(*records: Sent) -> str:
        producer = make_producer(bootstrap_servers)
        for key, version, n, cause in records:
            producer.produce(
                name,
                key=key,
                value=None if n is None else json.dumps({"n": n, "at": version}),
                headers=[
                    ("ce_cause", cause),
                    *([] if version is None else [("ce_version", str(version))]),
                ],
            )
        assert producer.flush(30) == 0
        return name

    return send


@pytest.fixture
def follow(admin, database_url, bootstrap_servers, wait_for):
    """A function that lets a group follow a topic; it returns what it was told."""
    admin.execute("create table state_rm (id text primary key, version bigint, n int)")
    admin.execute("create table side_rm (id text primary key, n int)")
    admin.execute("create table part_rm (id text, n int)")

    def follow(
        topic: str, group: str, records: int, *, side: bool = False, block: int = 100
    ) -> list[tuple[str, int, int | None]]:
        app = make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            consumer_block=block,
        )
        told: list[tuple[str, int, int | None]] = []

        @app.job(group="key")
        def notify(job, key: str) -> None: ...

        def tell(records, conn) -> None:
            for one in records:
                told.append((one.key, one.version, one.value and one.value["n"]))
                notify.enqueue(conn, key=one.key)

        def make_side(record) -> dict[str, Any]:
            n = record.value["n"]
            return {"side_rm": {"n": n}, "part_rm": [{"n": n}, {"n": n + 1}]}

        if side:
            tables = {"side_rm": "id", "part_rm": "id"}
            app.read_model(topic, group=group, tables=tables, on_change=tell)(make_side)
        else:
            app.read_model(
                topic, group=group, table="state_rm", key="id", on_change=tell
            )(lambda record: {"n": record.value["n"]})
        query = (
            "select sum(next_offset) from jobs_lib.offsets where consumer_group = %s"
        )
        with running(app, "consumers"):
            wait_for(
                lambda: admin.execute(query, (group,)).fetchone() == (records,),
                timeout=30,
                what=f"{records} are in",
            )
        return told

    return follow


@pytest.mark.guarantee("W56", "W57")
@pytest.mark.parametrize("side", [False, True], ids=["on the row", "beside"])
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_repeats_tell_nothing_and_a_topic_read_again_tells_nothing(
    send, follow, admin, side, block
):
    one, two, end = ("a", 1, 10, LIVE), ("b", 1, 20, LIVE), ("b", 2, None, LIVE)
    name = send(one, one, one, two, two, end, end)
    told = follow(name, "g", 7, side=side, block=block)
    # In one block only the last record of each key counts.
    expected = [("a", 1, 10), ("b", 1, 20), ("b", 2, None)]
    assert told == (expected if block == 1 else expected[:1])
    assert count(admin, "jobs") == len(told)
    assert follow(name, "again", 7, side=side, block=block) == []
    assert count(admin, "jobs") == len(told)


@pytest.mark.guarantee("W60")
@pytest.mark.parametrize("side", [False, True], ids=["on the row", "beside"])
def test_a_re_export_and_an_unchanged_row_tell_nothing(send, follow, side):
    name = send(("a", 1, 10, LIVE), ("b", 1, 20, REEXPORT))
    assert follow(name, "g", 2, side=side) == [("a", 1, 10)]
    # Newer versions: one without a change in what is kept, one of a re-export.
    send(("a", 2, 10, LIVE), ("b", 2, 21, REEXPORT), ("b", 3, 22, LIVE))
    assert follow(name, "g", 5, side=side) == [("b", 3, 22)]


@pytest.mark.guarantee("W60")
@pytest.mark.parametrize("side", [False, True], ids=["on the row", "beside"])
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_a_change_is_told_although_its_re_export_follows_at_once(
    send, follow, side, block
):
    both = ("a", 1, 10, LIVE), ("a", 1, 10, REEXPORT), ("a", 1, 10, REEXPORT)
    name = send(*both, ("b", None, 1, LIVE), ("b", None, 1, REEXPORT))
    told = [("a", 1, 10), ("b", None, 1)]
    assert follow(name, "g", 5, side=side, block=block) == told
    # A newer re-export tells nothing, whatever stands before it.
    send(("a", 1, 10, LIVE), ("a", 2, 11, REEXPORT))
    send(("b", 3, None, LIVE), ("b", 3, None, REEXPORT), ("b", 1, 10, LIVE))
    assert follow(name, "g", 10, side=side, block=block) == [("b", 3, None)]


def test_what_is_told_and_the_rows_are_one_transaction(
    send, admin, database_url, bootstrap_servers, follow, wait_for
):
    name = send(("a", 1, 10, LIVE))
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    may_go_on = threading.Event()

    def tell(records, conn) -> None:
        conn.execute("insert into side_rm values ('told', 1)")
        if not may_go_on.is_set():
            raise ValueError("not yet")

    app.read_model(name, group="g", table="state_rm", key="id", on_change=tell)(
        lambda record: {"n": record.value["n"]}
    )
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it fails")
        assert read(admin, "state_rm") == read(admin, "side_rm") == []
        may_go_on.set()
        wait_for(lambda: read(admin, "state_rm"), timeout=30, what="it goes on")
    assert read(admin, "side_rm") == [("told", 1)]


async def tell_async(records, conn) -> None:
    await conn.execute("insert into side_rm values ('told', %s)", (len(records),))


def test_an_async_function_is_told_too(
    send, admin, database_url, bootstrap_servers, follow, wait_for
):
    name = send(("a", 1, 10, LIVE), ("b", 1, 10, LIVE))
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    app.read_model(name, group="g", table="state_rm", key="id", on_change=tell_async)(
        lambda record: {"n": record.value["n"]}
    )
    with running(app, "consumers"):
        wait_for(lambda: read(admin, "side_rm"), timeout=30, what="it is told")
    assert read(admin, "side_rm") == [("told", 2)]


def test_a_function_that_takes_something_else_is_refused():
    app, odd = make_app(""), cast("Any", lambda one: None)
    with pytest.raises(ConfigurationError, match="records and conn"):
        app.read_model("t", group="g", table="a", key="b", on_change=odd)(
            lambda record: {}
        )
