"""The tables that are filled, and whether they are equal to the topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from benchmarks.consume.topics import Topic

    Connection = psycopg.Connection[tuple[Any, ...]]

_AIRCRAFT = """
create table aircraft_rm (
    tail text primary key, airport text, flights int, minutes_late int, version bigint
-- Room in each page lets an update leave the index alone.
) with (fillfactor = 80)
"""
_HANDLED = """
create table handled (
    tail text, airport text, flights int, minutes_late int, version bigint
)
"""
# All other rows would have to be read to count the marks.
_HANDLED_MARKS = "create index on handled (tail) where tail like 'mark-%'"
_OFFSETS = """
create table kafka_offsets (
    consumer_group text, topic text, partition int, next_offset bigint not null,
    primary key (consumer_group, topic, partition)
)
"""
_LOG = """
create table rm_log (n bigserial, tail text, version bigint);
create function log_rm() returns trigger language plpgsql as $$
begin
    insert into rm_log (tail, version) values (new.tail, new.version);
    return null;
end $$;
create trigger log_rm after insert or update on aircraft_rm
for each row execute function log_rm();
"""
_TELL = """
create function tell_rm() returns trigger language plpgsql as $$
begin
    perform pg_notify('rm', new.tail);
    return null;
end $$;
create trigger tell_rm after insert or update on aircraft_rm
for each row execute function tell_rm();
"""
_MARKS = "select count(*) from aircraft_rm where tail = any (%s)"
_MARKS_HANDLED = (
    "select count(*) from handled where tail like 'mark-%%' and tail = any (%s)"
)
_WRITES = """
select count(*), count(*) - count(distinct (tail, version)) from rm_log
"""
_WENT_BACK = """
select count(*), count(distinct tail) from (
    select tail, version, max(version) over (
        partition by tail order by n rows between unbounded preceding and 1 preceding
    ) as highest from rm_log
) writes where version < highest
"""


_SUMS = """
select tail, count(*), coalesce(sum(version), 0)::bigint from handled group by tail
"""


@dataclass(frozen=True)
class Table:
    """A table that consumers fill."""

    name: str
    create: tuple[str, ...]
    marks: str
    """Counts the marks among the given keys."""

    def make(self, connection: Connection) -> None:
        """Make it, with the table of offsets that some loops write."""
        for statement in (*self.create, _OFFSETS):
            connection.execute(statement.encode())

    def count(self, connection: Connection) -> int:
        """Count its rows."""
        return int(_ask(connection, f"select count(*) from {self.name}")[0])

    def is_empty(self, connection: Connection) -> bool:
        """Whether nothing has been committed yet."""
        return not _ask(connection, f"select exists (select from {self.name})")[0]

    def progress(self, connection: Connection, topic: Topic) -> float:
        """Which share of the topic's marks has been committed."""
        marks = int(_ask(connection, self.marks, topic.marks)[0])
        return marks / len(topic.marks)


_SECOND = _AIRCRAFT.replace("aircraft_rm", "aircraft_v2_rm")
"""For another version of the read model."""
READ_MODEL = Table("aircraft_rm", (_AIRCRAFT, _SECOND), _MARKS)
"""One row for each key: a later record replaces it, a tombstone removes it."""
HANDLED = Table("handled", (_HANDLED, _HANDLED_MARKS), _MARKS_HANDLED)
"""One row for each record."""


def find_difference(
    connection: Connection, table: Table, topic: Topic, *, deletes: bool = True
) -> str | None:
    """What differs between a table and its topic, in one line; None if they are equal.

    Args:
        connection: leads to the table.
        table: the table.
        topic: what it should be equal to.
        deletes: whether the consumer removes rows. If it does not, rows of keys that
            are gone may have any form.
    """
    if table is HANDLED:
        sums = {row[0]: row[1:] for row in connection.execute(_SUMS)}
        keys = topic.sums.keys() | sums.keys()
        wrong = sum(sums.get(key) != topic.sums.get(key) for key in keys)
        return f"the rows of {wrong} keys differ" if wrong else None
    rows = {
        row[0]: row[1:]
        for row in connection.execute(
            "select tail, airport, flights, minutes_late, version from aircraft_rm"
        )
        if deletes or row[0] not in topic.gone
    }
    if rows == topic.rows:
        return None
    missing = len(topic.rows.keys() - rows.keys())
    surplus = len(rows.keys() - topic.rows.keys())
    other = sum(rows[key] != topic.rows[key] for key in rows.keys() & topic.rows.keys())
    return f"{missing} rows are missing, {surplus} are too many, {other} differ"


def log_writes(connection: Connection) -> None:
    """Keep each write of the read model's table from now on."""
    connection.execute(_LOG.encode())


def tell_writes(connection: Connection) -> None:
    """Notify ``rm`` with the key at each write of the read model's table."""
    connection.execute(_TELL.encode())


def judge_writes(connection: Connection) -> dict[str, int]:
    """How many rows were written again, and how many went back to an older version."""
    writes, again = _ask(connection, _WRITES)
    back, keys = _ask(connection, _WENT_BACK)
    return {
        "writes": writes,
        "written_again": again,
        "gone_back_in_time": back,
        "keys_gone_back": keys,
    }


def _ask(connection: Connection, query: str, *values: Any) -> Sequence[Any]:
    given = values or None
    row = connection.execute(query.encode(), given, prepare=True).fetchone()
    assert row is not None
    return row
