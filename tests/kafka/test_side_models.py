"""Read models of any form: several tables under one version, which is beside them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jobs_lib import ConfigurationError
from jobs_lib.postgres.session import Session
from tests.support.apps import heard, make_app, running
from tests.support.records import make_producer

TABLES = {"order_rm": "id", "line_rm": "order_id"}
KEYS = range(1, 21)


@pytest.fixture
def tables(admin):
    """An order has one row, and one for each of its lines, which refer to it."""
    admin.execute("create table order_rm (id int primary key, customer text)")
    admin.execute(
        "create table line_rm (order_id int not null references order_rm, article text,"
        " count int)"
    )


@pytest.fixture
def make(database_url, bootstrap_servers):
    """A function that makes an app which keeps orders, in a given consumer group."""

    def make(topic: str, group: str, block: int):
        app = make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            consumer_block=block,
        )

        @app.read_model(topic, group=group, tables=TABLES)
        def order(record):
            lines = record.value["lines"]
            if not lines:
                return None
            return {
                "order_rm": {"customer": record.value["customer"]},
                "line_rm": [{"article": a, "count": n} for a, n in lines],
            }

        return app

    return make


@pytest.fixture
def read(admin):
    """A function that reads all orders with their lines."""

    def read() -> dict[int, tuple[str, list[Any]]]:
        rows = admin.execute(
            "select id, customer, coalesce(json_agg(json_build_array(article, count)"
            " order by article) filter (where article is not null), '[]')"
            " from order_rm left join line_rm on order_id = id group by id"
        )
        return {key: (customer, lines) for key, customer, lines in rows}

    return read


def make_order(key: int, version: int) -> dict[str, Any] | None:
    """The state of an order, of its version; None for its end."""
    if (key + version) % 4 == 0:
        return None
    lines = [[f"a{n}", version] for n in range((key * version) % 4)]
    return {"customer": f"c{version}", "lines": lines, "secret": "s3cret"}


def expect(key: int, version: int) -> tuple[str, list[Any]] | None:
    order = make_order(key, version)
    return (order["customer"], order["lines"]) if order and order["lines"] else None


def produce_orders(
    bootstrap_servers: str, topic: str, records: list[tuple[int, int]], versioned: bool
) -> None:
    producer = make_producer(bootstrap_servers)
    for key, version in records:
        order = make_order(key, version)
        producer.produce(
            topic,
            key=str(key),
            value=None if order is None else json.dumps(order),
            headers={"ce_version": str(version)} if versioned else None,
        )
    assert producer.flush(30) == 0


@pytest.fixture
def await_read(admin, wait_for):
    """A function that waits until a group has read so many records."""

    def await_read(group: str, records: int) -> None:
        query = (
            "select coalesce(sum(next_offset), 0) from jobs_lib.offsets"
            " where consumer_group = %s"
        )
        wait_for(
            lambda: admin.execute(query, (group,)).fetchone() == (records,),
            timeout=60,
            what=f"{records} are in",
        )

    return await_read


@pytest.mark.guarantee("W50", "W54", "W55")
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_one_record_fills_several_tables_under_one_version(
    make, tables, read, bootstrap_servers, topic, await_read, block
):
    name = topic(2)
    rng = random.Random(54)
    records = [(key, v) for key in KEYS for v in [*range(1, 7), rng.randint(1, 6)]]
    rng.shuffle(records)
    produce_orders(bootstrap_servers, name, records, versioned=True)
    expected = {key: e for key in KEYS if (e := expect(key, 6)) is not None}
    assert 0 < len(expected) < len(KEYS)
    for group in ("first", "again"):
        with running(make(name, group, block), "consumers"):
            await_read(group, len(records))
        assert read() == expected


@pytest.mark.guarantee("W55")
def test_without_versions_the_later_record_of_a_partition_counts(
    make, tables, read, bootstrap_servers, topic, await_read
):
    name = topic(1)
    rng = random.Random(55)
    records = [(key, v) for v in range(1, 6) for key in KEYS]
    rng.shuffle(records)
    last = dict(records)
    produce_orders(bootstrap_servers, name, records, versioned=False)
    expected = {key: e for key in KEYS if (e := expect(key, last[key])) is not None}
    for group, block in (("first", 100), ("again", 1)):
        with running(make(name, group, block), "consumers"):
            await_read(group, len(records))
        assert read() == expected


@pytest.mark.guarantee("W55")
def test_the_versions_of_one_table_may_stand_beside_it(
    admin, database_url, bootstrap_servers, topic, await_read
):
    name = topic(1)
    admin.execute("create table order_rm (id int primary key, customer text)")
    records = [(1, 2), (1, 1), (2, 1), (2, 2), (2, 1), (3, 2)]
    produce_orders(bootstrap_servers, name, records, versioned=True)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

    @app.read_model(name, group="g", table="order_rm", key="id", versions="side")
    def order(record):
        return {"customer": record.value["customer"]}

    with running(app, "consumers"):
        await_read("g", len(records))
    rows = admin.execute("select * from order_rm order by id").fetchall()
    # The second version of the second order is its end.
    assert rows == [(1, "c2"), (3, "c2")]


def test_rows_for_a_table_that_was_not_declared_are_refused(
    make, tables, database_url, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    produce_orders(bootstrap_servers, name, [(1, 1)], versioned=True)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

    @app.read_model(name, group="g", tables=TABLES)
    def order(record):
        return {"lines_rm": []}

    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it fails")
    ((_, fields), *_) = failed
    assert "rows for 'lines_rm', and the read model has the tables" in fields["error"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "the table of .* is None"),
        ({"table": "a"}, "the key of .* is None"),
        ({"tables": {}}, "give a mapping such as"),
        ({"tables": {"a": ""}}, "the key of .* is ''"),
        ({"tables": TABLES, "table": "a"}, "leave `table` and `key` out"),
        ({"tables": TABLES, "versions": "row"}, "share one version"),
        ({"table": "a", "key": "b", "versions": "col"}, "not 'col'"),
    ],
)
def test_tables_that_make_no_model_are_refused(arguments, told):
    app = make_app("")
    with pytest.raises(ConfigurationError, match=told):
        app.read_model("orders", group="g", **arguments)(lambda record: {})


@pytest.mark.guarantee("W52")
@pytest.mark.parametrize("beside", [False, True], ids=["on the row", "beside"])
def test_fields_that_are_not_mapped_never_reach_the_database(
    admin, database_url, bootstrap_servers, topic, await_read, monkeypatch, beside
):
    name = topic(1)
    admin.execute("create table order_rm (id int primary key, version bigint, c text)")
    produce_orders(bootstrap_servers, name, [(1, 1), (2, 1)], versioned=True)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

    @app.read_model(
        name,
        group="g",
        table="order_rm",
        key="id",
        versions="side" if beside else "row",
    )
    def order(record):
        assert record.value["secret"] == "s3cret"
        return {"c": record.value["customer"]}

    sent: list[str] = []
    execute = Session.execute

    def note(connection, query, params=None, **options):
        sent.append(str(params))
        return execute(connection, query, params, **options)

    monkeypatch.setattr(Session, "execute", note)
    with running(app, "consumers"):
        await_read("g", 2)
    assert any("c1" in one for one in sent)
    assert not any("s3cret" in one for one in sent)


@pytest.mark.parametrize("refused", ["a\0", {"a": 1}], ids=["NUL", "no adapter"])
def test_a_value_that_the_client_refuses_fails_alone_and_writes_no_half_block(
    admin, tables, database_url, bootstrap_servers, topic, wait_for, refused
):
    name = topic(1)
    producer = make_producer(bootstrap_servers)
    for n in range(10):
        producer.produce(name, b"{}", str(n), headers=[("ce_version", b"1")])
    assert producer.flush(30) == 0
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

    @app.read_model(name, group="g", tables=TABLES)
    def order(record):
        article = refused if record.key == "6" else "a"
        return {"order_rm": {"customer": "c"}, "line_rm": [{"article": article}]}

    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=60, what="it fails")
        for table, key in TABLES.items():
            rows = admin.execute(f"select {key} from {table} order by 1").fetchall()
            assert rows == [(n,) for n in range(6)]
        noted = admin.execute("select count(*) from jobs_lib.model_keys").fetchone()
        stored = admin.execute("select next_offset from jobs_lib.offsets").fetchone()
    assert {fields["offset"] for _, fields in failed} == {6}
    assert (noted, stored) == ((6,), (6,))


def test_a_refused_value_of_one_statement_keeps_the_others_of_its_block_back(
    admin, database_url, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    admin.execute("create table item_rm (id int primary key, version bigint, a text)")
    producer = make_producer(bootstrap_servers)
    for n in range(3):
        producer.produce(name, b"{}", str(n), headers=[("ce_version", b"1")])
    assert producer.flush(30) == 0
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)

    @app.read_model(name, group="g", table="item_rm", key="id")
    def item(record):
        # Rows with the same columns are written by one statement.
        return {"a": "a\0"} if record.key == "1" else {}

    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=60, what="it fails")
        rows = admin.execute("select id from item_rm").fetchall()
        stored = admin.execute("select next_offset from jobs_lib.offsets").fetchone()
    assert {fields["offset"] for _, fields in failed} == {1}
    assert (rows, stored) == ([(0,)], (1,))
