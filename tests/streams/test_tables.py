"""A table follows a stream, and the compacted topic alone rebuilds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from jobs_lib.operating.rewinds import rewind
from jobs_lib.operating.where import where
from tests.support.apps import running
from tests.support.records import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.expects("origins.lost", "fenced")

LAST = {f"t{n}": 3 for n in range(5)}
"""The states of the tenants at the end."""


@pytest.fixture
def cleaning(own_broker) -> Iterator[None]:
    """Let the broker compact at once, and not each 15 seconds."""

    def set_backoff(how: AlterConfigOpType) -> None:
        name = "log.cleaner.backoff.ms"
        change = ConfigEntry(name, "100", incremental_operation=how)
        broker = ConfigResource("broker", "1", incremental_configs=[change])
        for done in own_broker.admin.incremental_alter_configs([broker]).values():
            done.result()

    set_backoff(AlterConfigOpType.SET)
    yield
    set_backoff(AlterConfigOpType.DELETE)


@pytest.fixture
def declare(make, admin):
    """A function that makes an app with a stream and a table that follows it."""
    admin.execute(
        "create table made (id text, n int);"
        "create function note() returns trigger language plpgsql as $$ begin"
        " insert into public.made values (new.id, new.n); return new; end $$"
    )

    def declare(name: str, table: str):
        admin.execute(
            f"create table {table} (id text primary key, version bigint, n int);"
            f"create trigger note after insert on {table}"
            " for each row execute function note()"
        )
        app = make(heartbeat_interval=0.3, stale_after=5.0)

        @app.read_model(name, table=table, key="id", group=table)
        def row(record):
            return {"n": record.value["n"]}

        return app, app.stream(name)

    return declare


@pytest.fixture
def await_state(admin, wait_for):
    """A function that waits until a table has these states."""

    def wait(table: str, expected: dict[str, int]) -> None:
        query = f"select id, n from {table}"
        wait_for(
            lambda: dict(admin.execute(query).fetchall()) == expected,
            timeout=30,
            what=lambda: f"it has them: {admin.execute(query).fetchall()}",
        )

    return wait


@pytest.mark.guarantee("T2", "T16")
def test_an_event_creates_if_absent_changes_or_deletes_also_when_it_is_replayed(
    declare, name, admin, database, await_state
):
    app, stream = declare(name, "tenants")
    with running(app, "consumers"):
        stream.publish("t1", {"n": 1})
        await_state("tenants", {"t1": 1})
        stream.publish("t1", {"n": 2})
        # An event that comes twice creates nothing twice.
        stream.publish("t1", {"n": 2})
        await_state("tenants", {"t1": 2})
        stream.publish("t2", {"n": 1})
        await_state("tenants", {"t1": 2, "t2": 1})
        assert where(app, name, "t2").has_arrived
        stream.publish("t1", None)
        await_state("tenants", {"t2": 1})
        made = "select id, n from made where length(id) > 1 order by id, n"
        assert admin.execute(made).fetchall() == [("t1", 1), ("t2", 1)]
        stream.publish("end", {"n": 0})
        await_state("tenants", {"t2": 1, "end": 0})
        read = admin.execute(
            "select partition from jobs_lib.offsets where next_offset is not null"
        ).fetchall()
        rewind(database, "tenants", name, {number: 0 for (number,) in read})
        for partition in range(2):
            stream.publish(key_of(partition, 2), {"n": 9})
        ends = {key_of(0, 2): 9, key_of(1, 2): 9}
        await_state("tenants", {"t2": 1, "end": 0, **ends})
    known = [("end", 0), ("t1", 1), ("t2", 1)]
    assert admin.execute(made).fetchall() == known


@pytest.mark.guarantee("T3")
def test_the_compacted_topic_alone_rebuilds_the_table(
    declare, own_broker, admin, read_log, await_state, wait_for, cleaning
):
    name = own_broker.create(
        1,
        {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.001",
            "min.compaction.lag.ms": "0",
        },
    )
    app, stream = declare(name, "first")
    for n in (1, 2, 3):
        for key in LAST:
            stream.publish(key, {"n": n})
    stream.publish("gone", {"n": 1})
    stream.publish("gone", None)
    with running(app, "consumers"):
        await_state("first", LAST)

    def is_compacted() -> bool:
        # Only what lies before the newest segment is compacted.
        stream.publish("later", None)
        return len([one for one in read_log(name) if one.key in LAST]) == len(LAST)

    wait_for(is_compacted, timeout=60, what="only the last event of each is left")
    again, _ = declare(name, "second")
    with running(again, "consumers"):
        await_state("second", LAST)
