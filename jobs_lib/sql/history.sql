-- The history's partitions, one for each day until which finished jobs are kept.

-- name: lock_maintenance
-- A second process leaves the work to the first. The lock lasts for the transaction: one
-- of the session would not survive PgBouncer.
select pg_try_advisory_xact_lock(hashtextextended(%(schema)s, 7603))

-- name: history_days
-- List the days with a partition, and whether their time is over; then the days whose
-- rows are in the default partition.
select d.day, d.day < (clock_timestamp() at time zone 'UTC')::date, d.apart
from (
    select to_date(substr(c.relname, 9), 'YYYYMMDD') as day, true as apart
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
    join pg_class h on h.oid = i.inhparent and h.relname = 'history'
    join pg_namespace n on n.oid = h.relnamespace and n.nspname = %(schema)s
    where c.relname ~ '^history_[0-9]{{8}}$'
    union all
    select distinct keep_until, false from {schema}.history_default
) d
order by 1

-- name: today
select (clock_timestamp() at time zone 'UTC')::date

-- name: make_history
select {schema}.make_history(%(day)s, %(most)s::int)

-- name: empty_history
select {schema}.empty_history(%(day)s)

-- name: drop_history
select {schema}.drop_history(%(day)s)

-- name: delete_history
-- Delete rows that never got a partition of their own: in batches, oldest first.
delete from {schema}.history_default where ctid = any (array(
    select h.ctid from {schema}.history_default h
    where h.keep_until < (clock_timestamp() at time zone 'UTC')::date
    limit %(limit)s
))

-- name: forget_cancellations
-- Delete requests whose jobs have ended without noticing them.
delete from {schema}.cancellations c
where c.requested_at < clock_timestamp() - make_interval(secs => %(after)s)
    and not exists (
        select from {schema}.jobs j where j.origin = c.origin and j.id = c.id
    )
