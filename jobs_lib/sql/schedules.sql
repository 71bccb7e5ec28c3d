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

-- name: limit_idling
-- A pod that is stopped between two statements must not block the row for the others.
set local idle_in_transaction_session_timeout = '10s'

-- name: move_schedule
-- Compare and set: of all pods that saw the same last tick, only one can move it.
update {schema}.schedules set ticked_at = %(until)s
where name = %(name)s and ticked_at = %(ticked_at)s
