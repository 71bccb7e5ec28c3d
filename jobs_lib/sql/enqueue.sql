-- Insert jobs in the caller's transaction. The ids of a group rise in the order of commit.

-- name: enqueue
-- The locks come first and the id is drawn after them, because an INSERT … SELECT
-- evaluates its defaults for each row that the CTE delivers: ids of one group then rise
-- in the order in which their transactions commit. `VALUES ((select lock))` would draw
-- the id first; a CTE that nothing reads would never lock.
with locked as materialized (
    select
        pg_advisory_xact_lock_shared(hashtextextended(%(origin)s, 7601)),
        pg_advisory_xact_lock(hashtextextended(%(group)s, 7602))
)
insert into {schema}.jobs (origin, type, "group", state, payload, run_at, headers)
select
    %(origin)s, %(type)s, %(group)s,
    -- A time that has come is no delay: the claim's cursor then finds the row.
    case when %(run_at)s::timestamptz > clock_timestamp() then 'scheduled' else 'available' end,
    %(payload)s::jsonb, %(run_at)s::timestamptz, %(headers)s::jsonb
from locked
returning id

-- name: enqueue_unordered
-- For a job without a group, or whose caller gave up the order: no lock, nobody waits.
insert into {schema}.jobs (origin, type, "group", state, payload, run_at, headers)
select
    %(origin)s, %(type)s, %(group)s,
    case when %(run_at)s::timestamptz > clock_timestamp() then 'scheduled' else 'available' end,
    %(payload)s::jsonb, %(run_at)s::timestamptz, %(headers)s::jsonb
returning id

-- name: lock_groups
-- For a bulk call: each group once, sorted by the lock's own value, so that two bulk
-- calls never wait for each other in a circle. Few groups: shared on their origins,
-- exclusive on each group.
select
    (select count(pg_advisory_xact_lock_shared(key)) from (
        select distinct hashtextextended(origin, 7601) as key
        from unnest(%(origins)s::text[]) as o(origin) order by key
    ) origins),
    (select count(pg_advisory_xact_lock(key)) from (
        select distinct hashtextextended(g, 7602) as key
        from unnest(%(groups)s::text[]) as g order by key
    ) groups)

-- name: lock_origins_of_groups
-- Many groups: their origins exclusively. A lock for each of 100,000 groups would
-- exhaust the server's shared memory for locks.
select count(pg_advisory_xact_lock(key)) from (
    select distinct hashtextextended(origin, 7601) as key
    from unnest(%(origins)s::text[]) as o(origin) order by key
) origins

-- name: copy_jobs
copy {schema}.jobs (origin, type, "group", state, payload, run_at, headers) from stdin
