-- Periodic jobs: which tick was the last.

-- name: read_clock
select clock_timestamp()

-- name: register_schedule
-- A new schedule starts from now, and so does one whose expression or zone has changed:
-- what the new expression would have meant in the past was never missed.
insert into {schema}.schedules as s (name, definition, ticked_at)
values (%(name)s, %(definition)s, %(now)s)
on conflict (name) do update set
    definition = excluded.definition,
    ticked_at = greatest(s.ticked_at, excluded.ticked_at)
where s.definition <> excluded.definition

-- name: read_schedules
select name, ticked_at from {schema}.schedules where name = any (%(names)s::text[])

-- name: limit_idling
-- A pod that is stopped between two statements must not keep the row from the others.
set local idle_in_transaction_session_timeout = '10s'

-- name: move_schedule
-- Compare and set: of all pods that saw the same last tick, one finds it still there.
update {schema}.schedules set ticked_at = %(until)s
where name = %(name)s and ticked_at = %(ticked_at)s
