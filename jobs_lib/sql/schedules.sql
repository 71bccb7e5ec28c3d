-- Periodic jobs: the last tick of each schedule.

-- name: read_clock
select clock_timestamp()

-- name: register_schedule
-- A new schedule starts from now, and so does one whose expression or zone has changed:
-- ticks that the new expression would have had in the past were not missed.
insert into {schema}.schedules as s (name, definition, ticked_at)
values (%(name)s, %(definition)s, %(now)s)
on conflict (name) do update set
    definition = excluded.definition,
    ticked_at = greatest(s.ticked_at, excluded.ticked_at)
where s.definition <> excluded.definition

-- name: read_schedules
select name, ticked_at from {schema}.schedules where name = any (%(names)s::text[])

-- name: limit_waiting
-- A pod that is stopped between two statements must not block the row for the others.
-- Nor may a group whose lock somebody holds for long: the other schedules wait behind it.
select set_config('idle_in_transaction_session_timeout', '10s', true),
    set_config('lock_timeout', %(wait)s::text, true)

-- name: move_schedule
-- Compare and set: of all pods that saw the same last tick, only one can move it. While
-- one does so, the others pass the schedule over, and look again later.
update {schema}.schedules s set ticked_at = %(until)s
from (
    select o.name from {schema}.schedules o
    where o.name = %(name)s and o.ticked_at = %(ticked_at)s
    for update skip locked
) free
where s.name = free.name
