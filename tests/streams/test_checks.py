"""Events are checked before they are sent; those that change nothing are not sent."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from psycopg.rows import dict_row

from jobs_lib import (
    ConfigurationError,
    PayloadError,
    Published,
    RefusedError,
    derive_key,
)
from jobs_lib.kafka.places import find_committed_ends
from tests.support.apps import running
from tests.support.canary import VALUE
from tests.support.transactions import open_transaction

pytestmark = pytest.mark.expects("fenced")


@dataclass
class Tenant:
    """The state of a tenant."""

    email: str
    country: str


ADA = Tenant("ada@example.org", "DE")


def read_tenant(key, conn):
    """Read the state that the table has of a tenant."""
    row = conn.execute("select email, country from tenants where id = %s", (key,))
    found = row.fetchone()
    return None if found is None else Tenant(*found)


def use_names(key, value, conn):
    """Check nothing, and want rows by the names of their columns."""
    conn.row_factory = dict_row


def read_by_name(key, conn):
    """The same as the plain function, with rows by the names of their columns."""
    conn.row_factory = dict_row
    row = conn.execute("select email, country from tenants where id = %s", (key,))
    found = row.fetchone()
    return None if found is None else Tenant(**found)


@pytest.fixture
def tables(admin):
    """A table that follows the stream, and one that it refers to."""
    admin.execute(
        "create table tenants"
        " (id text primary key, version bigint, email text, country text);"
        "create table countries (code text primary key);"
        "insert into countries values ('DE')"
    )


@pytest.fixture
def declare(make, name, tables):
    """A function that makes an app with a stream and the read model of it."""

    def declare(**options):
        app = make(heartbeat_interval=0.3, stale_after=5.0)
        stream = app.stream(name, value=Tenant, **options)

        @app.read_model(name, table="tenants", key="id", group=name, value=Tenant)
        def tenant(record):
            return {"email": record.value.email, "country": record.value.country}

        return app, stream

    return declare


@pytest.fixture
def await_table(admin, read_log, name, wait_for):
    """A function that waits until the table has all events of the topic."""

    def wait() -> None:
        ends: dict[int, int] = {}
        for event in read_log(name):
            ends[event.partition] = event.offset + 1
        query = "select partition, next_offset from jobs_lib.offsets where topic = %s"
        wait_for(
            lambda: {*ends.items()} <= {*admin.execute(query, (name,)).fetchall()},
            timeout=30,
            what="the table has all events",
        )

    return wait


@pytest.mark.guarantee("T8")
def test_a_reference_to_what_is_not_there_is_refused_and_not_sent(declare, read_log):
    def check(key, value, conn):
        found = conn.execute("select from countries where code = %s", (value.country,))
        if not found.rowcount:
            raise RefusedError("there is no such country")

    _, tenants = declare(check=check)
    nowhere = Tenant("ada@example.org", "XX")
    with pytest.raises(RefusedError, match="no such country"):
        tenants.publish("t1", nowhere)
    with pytest.raises(RefusedError, match="no such country"):
        asyncio.run(tenants.publish_async("t1", nowhere, request="r1"))
    assert read_log(tenants.name) == []
    # A refused request was not sent, and may come again in another form.
    assert tenants.publish("t1", ADA, request="r1").changed
    assert len(read_log(tenants.name)) == 1


@pytest.mark.guarantee("T8", "T14")
def test_a_repeated_request_is_not_refused_because_of_its_own_event(
    declare, await_table, read_log
):
    sent = threading.Event()

    def check(key, value, conn):
        # The second call has passed the look for the request, before the first adds it.
        if (
            sent.is_set()
            and conn.execute(
                "select from tenants where email = %s", (value.email,)
            ).rowcount
        ):
            raise RefusedError("the email is in use")
        if not sent.is_set():
            sent.set()
            with running(app, "consumers"):
                first.append(tenants.publish("t1", ADA, request="r1"))
                await_table()
            raise RefusedError("the email is in use")

    first: list[Published] = []
    app, tenants = declare(check=check)
    assert tenants.publish("t1", ADA, request="r1") == first[0]
    assert len(read_log(tenants.name)) == 1
    with pytest.raises(RefusedError, match="in use"):
        tenants.publish("t2", ADA, request="r2")


@pytest.mark.guarantee("T8", "T14")
def test_a_call_may_have_a_check_of_its_own_which_its_repetition_passes(
    declare, await_table, read_log
):
    def refuse_known(key, value, conn):
        if conn.execute("select from tenants where id = %s", (key,)).rowcount:
            raise RefusedError("there is such a tenant")

    app, tenants = declare()
    with running(app, "consumers"):
        first = tenants.publish("t1", ADA, request="r1", check=refuse_known)
        await_table()
    assert tenants.publish("t1", ADA, request="r1", check=refuse_known) == first
    for request in ("r2", None):
        with pytest.raises(RefusedError, match="such a tenant"):
            tenants.publish("t1", ADA, request=request, check=refuse_known)
    asynchronous = tenants.publish_async("t1", ADA, request="r2", check=refuse_known)
    with pytest.raises(RefusedError, match="such a tenant"):
        asyncio.run(asynchronous)
    assert len(read_log(tenants.name)) == 1
    # Without it the event is a change.
    assert tenants.publish("t1", ADA, request="r2").changed


def test_an_async_check_of_a_call_is_refused(declare, read_log):
    async def check(key, value, conn):
        raise RefusedError("nobody awaits this")

    _, tenants = declare()
    with pytest.raises(ConfigurationError, match="make it a plain function"):
        tenants.publish("t1", ADA, check=check)
    assert read_log(tenants.name) == []


@pytest.mark.guarantee("T15", "T16")
def test_two_entities_with_the_same_unique_fields_are_one(
    declare, await_table, admin, read_log
):
    app, tenants = declare()
    for plan in ("DE", "FR"):
        key = derive_key("tenants", "ada@example.org")
        tenants.publish(key, Tenant("ada@example.org", plan))
    assert len({(one.partition, one.key) for one in read_log(tenants.name)}) == 1
    with running(app, "consumers"):
        await_table()
    (row,) = admin.execute("select id, country from tenants").fetchall()
    assert row == (key, "FR")


@pytest.mark.guarantee("T15")
def test_a_derived_key_follows_from_its_parts_alone():
    # The same in each release: entities are found by it.
    assert derive_key("ada@example.org") == "3ab64d27-82d2-5d08-a476-6e48aac882c1"
    keys = {
        derive_key(*parts) for parts in [("a",), ("b",), ("a", "b"), ("ab",), ("a,b",)]
    }
    assert len(keys) == 5
    wrong_parts: list[tuple[Any, ...]] = [(), ("",), ("a", None)]
    for wrong in wrong_parts:
        with pytest.raises(PayloadError, match="texts that are not empty"):
            derive_key(*wrong)


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize(
    "options",
    [{"current": read_tenant}, {"current": read_by_name, "check": use_names}],
    ids=["rows", "rows by name"],
)
def test_a_repeated_put_and_a_repeated_delete_send_nothing(
    declare, await_table, read_log, options
):
    app, tenants = declare(**options)
    with running(app, "consumers"):
        for value in (ADA, None):
            first = tenants.publish("t1", value)
            await_table()
            again = tenants.publish("t1", value)
            assert (first.changed, again.changed) == (True, False)
            assert (again.offset, again.content) == (None, first.content)
            # A request has this answer for good.
            for _ in range(2):
                assert tenants.publish("t1", value, request=f"r{value}") == again
    assert len(read_log(tenants.name)) == 2


@pytest.mark.guarantee("T8")
def test_a_change_back_is_sent_while_the_table_is_behind(
    declare, await_table, read_log, admin
):
    app, tenants = declare(current=read_tenant)
    other = Tenant("ada@example.org", "FR")
    with running(app, "consumers"):
        tenants.publish("t1", ADA)
        await_table()
    assert tenants.publish("t1", other).changed
    # The table still says what this event says.
    assert tenants.publish("t1", ADA).changed
    log = [one.json["country"] for one in read_log(tenants.name)]
    assert log == ["DE", "FR", "DE"]


@pytest.mark.guarantee("T8")
def test_a_change_back_is_sent_while_an_open_transaction_hides_the_change(
    declare, await_table, read_log, own_broker
):
    app, tenants = declare(current=read_tenant)
    other = Tenant("ada@example.org", "FR")
    with running(app, "consumers"):
        tenants.publish("t1", ADA)
        await_table()
        hiding = open_transaction(own_broker.bootstrap_servers, tenants.name, 2)
        assert tenants.publish("t1", other).changed
        # The consumer has read all that it can see, and the table says the same.
        assert tenants.publish("t1", ADA, request="r1").changed
    hiding.abort_transaction(60)
    log = [one.json["country"] for one in read_log(tenants.name, "t1")]
    assert log == ["DE", "FR", "DE"]


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize("ends", ["committed", "aborted"])
def test_a_repeated_put_sends_nothing_behind_a_transaction_that_has_ended(
    declare, await_table, own_broker, wait_for, ends
):
    app, tenants = declare(current=read_tenant)
    sent = json.dumps({"email": ADA.email, "country": ADA.country}).encode()
    with running(app, "consumers"):
        partition = tenants.publish("t1", ADA).partition
        ending = open_transaction(own_broker.bootstrap_servers, tenants.name, 0)
        for _ in range(3):
            ending.produce(tenants.name, sent, key="t1", partition=partition)
        if ends == "committed":
            ending.commit_transaction(60)
        else:
            ending.flush(60)
            ending.abort_transaction(60)
        wait_for(
            # The first event, those of the transaction, and its marker.
            lambda: find_committed_ends(app.settings, tenants.name)[partition] == 5,
            timeout=30,
            what="the transaction has ended",
        )
        await_table()
        for request in (None, "r1"):
            assert not tenants.publish("t1", ADA, request=request).changed
        assert tenants.publish("t1", Tenant(ADA.email, "FR")).changed


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize(
    ("offset", "topic_id"), [(1_000, None), (0, uuid4())], ids=["beyond", "other id"]
)
def test_a_table_of_the_topic_before_says_nothing_of_one_that_was_made_anew(
    declare, read_log, admin, offset, topic_id
):
    _, tenants = declare(current=read_tenant)
    admin.execute("insert into tenants values ('t1', 1, %s, %s)", (ADA.email, "DE"))
    admin.execute(
        "insert into jobs_lib.offsets"
        " (consumer_group, topic, partition, next_offset, topic_id)"
        " select %(topic)s, %(topic)s, n, %(offset)s, %(id)s"
        " from generate_series(0, 1) n",
        {"topic": tenants.name, "offset": offset, "id": topic_id},
    )
    assert tenants.publish("t1", ADA).changed
    assert len(read_log(tenants.name)) == 1


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize("request_id", [None, "r1"])
def test_a_state_that_does_not_fit_the_stream_is_not_blamed_on_the_caller(
    declare, await_table, read_log, caplog, request_id
):
    states = [{"email": VALUE}, ADA]
    app, tenants = declare(current=lambda key, conn: states[0])
    with running(app, "consumers"):
        # Until the table has the key's partition, its state is not looked at.
        tenants.publish("t1", ADA)
        await_table()
        # Any valid value differs from it, and repairs the entity.
        assert tenants.publish("t1", ADA, request=request_id).changed
        await_table()
        states.pop(0)
        assert not tenants.publish("t1", ADA).changed
    assert len(read_log(tenants.name, "t1")) == 2
    assert f"`current` of the stream {tenants.name!r}" in caplog.text
    assert VALUE not in caplog.text


def test_current_without_a_consumer_is_refused(make, name, tables):
    tenants = make().stream(name, value=Tenant, current=read_tenant)
    with pytest.raises(ConfigurationError, match="declares no consumer"):
        tenants.publish("t1", ADA)


@pytest.mark.guarantee("T8")
def test_an_error_of_a_check_sends_nothing(declare, read_log):
    def check(key, value, conn):
        raise ValueError("a fault in the check")

    _, tenants = declare(check=check)
    with pytest.raises(ValueError, match="a fault in the check"):
        tenants.publish("t1", ADA, request="r1")
    assert read_log(tenants.name) == []
