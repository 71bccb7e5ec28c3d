"""The rows of a block and its offset are one transaction, whatever ends it."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Message

from jobs_lib import App
from jobs_lib.consuming.offsets import Offsets
from jobs_lib.consuming.progress import Progress
from jobs_lib.errors import FencedError

PARTITION = ("states", 0)
NOW = datetime.now(UTC)


@pytest.fixture(params=["row", "side"])
def model(request, admin):
    """A read model, with its versions in the rows or beside them."""
    admin.execute(
        "create table model (id text primary key, version bigint, n int check (n < 9))"
    )
    app = App("test")

    @app.read_model(
        "states", table="model", key="id", group="g", versions=request.param
    )
    def row(record):
        return {"n": record.value}

    (declared,) = app.consumers
    return declared.model


@pytest.fixture
def offsets(database, admin) -> Offsets:
    """The offsets of a process that owns the partition in epoch 1."""
    owner = uuid4()
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('consume:g', 'states/0', %s, 1)",
        (owner,),
    )
    return Offsets(database.queries, "g", owner)


@pytest.fixture
def connection(database, offsets):
    """A connection, as a thread of a consumer has it."""
    with database.connect("test") as connection:
        connection.autocommit = False
        offsets.make(connection, [PARTITION])
        yield connection


def make_block(*values: int) -> list[Message]:
    """Records of two kinds, so that the block takes several statements."""
    records = [
        Message(*PARTITION, offset=n, key=b"k%d" % n, value=b"%d" % value)
        for n, value in enumerate(values)
    ]
    end = Message(*PARTITION, offset=len(values), key=b"k0", value=None)
    return [*records, end]


def write(
    connection, offsets, model, block, *, epoch: int = 1, meanwhile=lambda: None
) -> None:
    changes = model.read(block)
    model.learn_types(connection, changes)
    meanwhile()
    progress = Progress(PARTITION, epoch, None)
    with offsets.advancing(connection, progress, len(block), NOW, lambda: None):
        model.write(connection, changes, None)


def read(admin) -> list[tuple[object, ...]]:
    """All that a block writes."""
    return [
        *admin.execute("select id, n from model order by id"),
        *admin.execute("select key from jobs_lib.model_keys where is_gone"),
        *admin.execute("select next_offset from jobs_lib.offsets"),
    ]


@pytest.mark.guarantee("W76")
def test_rows_and_offset_go_in_together(connection, offsets, model, admin):
    write(connection, offsets, model, make_block(1, 2, 3))
    assert read(admin) == [("k1", 2), ("k2", 3), ("k0",), (3 + 1,)]


@pytest.mark.guarantee("W76")
def test_a_process_that_was_fenced_writes_neither(connection, offsets, model, admin):
    with pytest.raises(FencedError):
        write(connection, offsets, model, make_block(1, 2, 3), epoch=2)
    assert read(admin) == [(None,)]
    # The connection is as it was.
    assert not connection.autocommit
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    write(connection, offsets, model, make_block(1, 2, 3))


@pytest.mark.guarantee("W64", "W82")
def test_a_process_writes_neither_once_its_resynchronisation_has_ended(
    database, connection, offsets, model, admin
):
    owner = admin.execute("select owner from jobs_lib.origins").fetchone()[0]
    again = Offsets(database.queries, "g", owner, again=True)
    begin = (
        "insert into jobs_lib.resyncs (model, topic, consumer_group, begins, notes)"
        " values ('model', 'states', %s, 'start', 3)"
    )
    # Another one has begun since: it has another group.
    admin.execute(begin, ("other",))
    with pytest.raises(FencedError):
        write(connection, again, model, make_block(1, 2, 3))
    assert read(admin) == [(None,)]
    admin.execute("delete from jobs_lib.resyncs")
    admin.execute(begin, ("g",))
    write(connection, again, model, make_block(1, 2, 3))
    assert read(admin) == [("k1", 2), ("k2", 3), ("k0",), (3 + 1,)]


def take_elsewhere(model) -> None:
    """As another thread does that takes a partition behind a switch."""
    for place in ("elsewhere", "model"):
        model.place({"model": place})


def fail_elsewhere(model) -> None:
    """As another thread does whose block the table has refused."""
    model.explain(psycopg.errors.UndefinedColumn())


@pytest.mark.guarantee("W76")
@pytest.mark.parametrize("disturb", [take_elsewhere, fail_elsewhere])
def test_what_other_threads_learn_of_the_table_tears_no_block(
    connection, offsets, model, admin, monkeypatch, disturb
):
    model = model.make_anew()
    note_shown = model.note_shown

    def note(*given) -> None:
        disturb(model)
        note_shown(*given)

    monkeypatch.setattr(model, "note_shown", note)
    with pytest.raises(FencedError):
        write(connection, offsets, model, make_block(1, 2, 3), epoch=2)
    assert read(admin) == [(None,)]
    write(
        connection,
        offsets,
        model,
        make_block(1, 2, 3),
        meanwhile=lambda: disturb(model),
    )
    assert read(admin) == [("k1", 2), ("k2", 3), ("k0",), (3 + 1,)]


@pytest.mark.guarantee("W76")
def test_a_row_that_is_refused_leaves_the_offset_alone(
    connection, offsets, model, admin
):
    with pytest.raises(psycopg.errors.CheckViolation):
        write(connection, offsets, model, make_block(1, 99, 3))
    assert read(admin) == [(None,)]
    write(connection, offsets, model, make_block(1, 2, 3))
