"""A table to re-export, its loaded keys, and a job that no executor runs."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jobs_lib import App
from jobs_lib.executor.lane import Finished, Lane
from jobs_lib.outbox.topic import Entity
from tests.support.claimed import make_claimed

if TYPE_CHECKING:
    from jobs_lib.postgres.database import Database

INSTALLATION = uuid.uuid4()


def make_entity(source="aircraft", key="tail", name="aircraft"):
    """An entity; these tests never load its states."""
    states = App("test").topic("aircraft-state")
    return Entity(name, states, source, key, lambda _conn, _keys: {})


def make_table(database: Database, keys, type_="text", source="aircraft"):
    """Make a table with these keys, in this order."""
    with database.connect("test") as connection:
        connection.execute(f"create table {source} (tail {type_}, model text)")
        with (
            connection.cursor() as cursor,
            cursor.copy(f"copy {source} (tail) from stdin") as copy,
        ):
            for key in keys:
                copy.write_row([key])
        connection.execute(f"analyze {source}")


def query(database: Database, text, *values):
    """The rows of a query, on a connection of its own."""
    with database.connect("test") as connection:
        return connection.execute(text, values or None).fetchall()


def loaded_keys(database: Database):
    """Every key of every chunk job, sorted; a key loaded twice is here twice."""
    rows = query(
        database,
        "select k from jobs_lib.jobs, jsonb_array_elements_text(payload->'keys') k",
    )
    return sorted(key for (key,) in rows)


def origins_of_keys(database: Database):
    """The origin of the job of each key."""
    return dict(
        query(
            database,
            "select k, origin from jobs_lib.jobs,"
            " jsonb_array_elements_text(payload->'keys') k",
        )
    )


def make_job(database: Database, **values):
    """A chunk job with a plain transaction."""

    @contextmanager
    def lend(job):
        with database.connect("test job") as connection, connection.transaction():
            yield connection

    lane = Lane("local/0", 1, None, 1, INSTALLATION, Finished())
    job = make_claimed(lane, values.get("id", 1))
    job.lend = lend  # type: ignore[assignment]
    return job
