"""A re-synchronisation makes no row whose key ends while it waits for that row."""

from __future__ import annotations

import json
import threading

import pytest
from confluent_kafka import Message

from jobs_lib import App


def make_message(offset: int, version: int | None, n: int | None) -> Message:
    """A record of one key; without ``n`` it is a tombstone."""
    return Message(
        "states",
        0,
        offset=offset,
        key=b"a",
        value=None if n is None else json.dumps({"n": n}).encode(),
        headers=[] if version is None else [("ce_version", b"%d" % version)],
    )


@pytest.fixture
def model(admin):
    """A read model that has its versions in the rows."""
    admin.execute("create table model (id text primary key, version bigint, n int)")
    app = App("test")

    @app.read_model("states", table="model", key="id", group="g")
    def row(record):
        return {"n": record.value["n"]}

    (declared,) = app.consumers
    return declared.model


def write(connection, model, *messages: Message) -> None:
    changes = model.read(messages)
    model.learn_types(connection, changes)
    with connection.transaction():
        model.write(connection, changes, None)


@pytest.fixture
def race(database, model, admin, wait_for):
    """A function that reads records again while the service ends the key.

    It returns what n the row has then; None if there is no row.
    """

    def race(end: Message, *again: Message) -> int | None:
        with database.connect("service") as service, database.connect("again") as other:

            def read_again() -> None:
                write(other, model.make_anew(), *again)

            def is_waiting() -> bool:
                query = "select 1 from pg_locks where pid = %s and not granted"
                return admin.execute(query, (other.info.backend_pid,)).rowcount == 1

            write(service, model, make_message(0, 5, 1))
            reader = threading.Thread(target=read_again)
            with service.transaction():
                write(service, model, end)
                reader.start()
                wait_for(is_waiting, timeout=30, what="it waits for the row")
            reader.join(30)
        row = admin.execute("select n from model").fetchone()
        return None if row is None else row[0]

    return race


@pytest.mark.guarantee("W63")
@pytest.mark.parametrize("version", [6, 5, None])
def test_a_key_that_ends_while_its_row_is_written_again_stays_gone(race, version):
    # The table has another row than the mapping makes now.
    assert race(make_message(7, version, None), make_message(0, 5, 2)) is None


@pytest.mark.guarantee("W63")
@pytest.mark.parametrize(
    ("end", "version"),
    [(6, 7), (None, 5)],
    ids=["a newer version", "an equal one behind an end without any"],
)
def test_a_key_that_comes_back_behind_its_end_is_written(race, end, version):
    assert race(make_message(7, end, None), make_message(8, version, 2)) == 2
