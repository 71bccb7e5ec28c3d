"""The statements that consumers share; it needs the standard library alone."""

from __future__ import annotations

COLUMNS = ("tail", "airport", "flights", "minutes_late", "version")
UPSERT = """
insert into aircraft_rm (tail, airport, flights, minutes_late, version)
values (%s, %s, %s, %s, %s)
on conflict (tail) do update set airport = excluded.airport, flights = excluded.flights,
    minutes_late = excluded.minutes_late, version = excluded.version
"""
DELETE = "delete from aircraft_rm where tail = %s"
INSERT = "insert into handled values (%s, %s, %s, %s, %s)"

# A block in three steps: COPY into a table of the session, a merge, and the deletes.
INCOMING = """
create temp table incoming (
    tail text, airport text, flights int, minutes_late int, version bigint
) on commit delete rows
"""
MERGE = """
insert into aircraft_rm as a select * from incoming
on conflict (tail) do update set airport = excluded.airport, flights = excluded.flights,
    minutes_late = excluded.minutes_late, version = excluded.version
where a.version < excluded.version
"""
REMOVE = "delete from aircraft_rm where tail = any (%s)"

# The outbox of the loop that is measured beside the library's.
BRIDGE = """
create table bridge (
    id bigint generated always as identity primary key, key text, value bytea
)
"""
WRITE_BRIDGE = """
with _ as (insert into bridge (key, value) values (%s, %s))
select pg_notify('bridge', '')
"""
