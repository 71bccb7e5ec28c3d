-- The life of a job: enqueue, look, claim, complete, retry, discard.
--
-- Every statement that changes a job row reads the origins rows `for share` under owner
-- and epoch first: a take-over locks them for update, so a stale owner changes nothing.

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

-- name: look
-- Cheap enough to ask often: is there anything after the cursors, or anything due? The
-- orders mean nothing here; they keep the planner on the index, where a wrong guess of
-- how soon a row is found would let it read the table.
select
    exists (
        select from unnest(%(origins)s::text[], %(cursors)s::bigint[]) as o(origin, cursor)
        cross join lateral (
            select from {schema}.jobs j
            where j.origin = o.origin and j.id > o.cursor order by j.id limit 1
        ) fresh
    ),
    exists (
        select from unnest(%(origins)s::text[]) as o(origin)
        cross join lateral (
            select from {schema}.jobs j
            where j.origin = o.origin and j.state = 'scheduled'
                and j.run_at <= clock_timestamp() order by j.run_at limit 1
        ) due
    )

-- name: promote
-- Makes due jobs available again and returns them: they lie behind the cursor, so the
-- next claim is told of them. `limit` bounds the round, not the backlog.
with own as materialized (
    select o.origin from {schema}.origins o
    join unnest(%(origins)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = 'execute' and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o skip locked
),
due as materialized (
    select d.* from own cross join lateral (
        select j.origin, j.id from {schema}.jobs j
        where j.origin = own.origin and j.state = 'scheduled'
            and j.run_at <= clock_timestamp()
        order by j.run_at limit %(limit)s
    ) d
)
update {schema}.jobs j set state = 'available'
from due where j.origin = due.origin and j.id = due.id
returning j.origin, j.id

-- name: claim
-- The next jobs of the owned origins, without a write to any job row: the owner is alone
-- in its origins, so a cursor per origin says what it has looked at. Behind the cursor a
-- row is in flight, or stands behind an unfinished row of its group (the group's lane
-- reaches it), or was committed late (the sweep finds it).
with own as materialized (
    -- An origin that is being taken over is skipped, not waited for.
    select o.origin from {schema}.origins o
    join unnest(%(origins)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = 'execute' and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o skip locked
),
looked as materialized (
    -- One branch per origin: `origin = any(…) order by id limit` would sort the backlog.
    select o.origin, r.*, false as extra
    from unnest(%(origins)s::text[], %(cursors)s::bigint[], %(windows)s::bigint[])
        as o(origin, cursor, size)
    cross join lateral (
        select j.id, j.type, j."group", j.state, j.attempt
        from {schema}.jobs j
        where j.origin = o.origin and j.id > o.cursor
        order by j.id limit o.size
    ) r
    where o.origin in (select origin from own)
    union all
    -- Promoted and late ones, which lie behind the cursor.
    select x.origin, r.*, true
    from unnest(%(extra_origins)s::text[], %(extra_ids)s::bigint[]) as x(origin, id)
    cross join lateral (
        -- `offset 0` keeps the planner from turning this into a join over all rows.
        select j.id, j.type, j."group", j.state, j.attempt
        from {schema}.jobs j where j.origin = x.origin and j.id = x.id offset 0
    ) r
    where x.origin in (select origin from own)
),
ready as materialized (
    -- A type that this process does not know is left for one that knows it.
    select * from looked where state = 'available' and type = any (%(types)s::text[])
),
first as (
    select origin, "group", min(id) as id from ready
    where "group" is not null group by origin, "group"
),
busy as (
    select * from unnest(%(busy_origins)s::text[], %(busy_groups)s::text[])
        as b(origin, "group")
),
heads as materialized (
    -- A group with a lane in flight is left out: its next row would look like the head
    -- as soon as a handler's own transaction has completed the row before it.
    select f.origin, f."group", f.id from first f
    where not exists (
            select from busy b where b.origin = f.origin and b."group" = f."group"
        )
        -- Written as a range, and without a bound on id: an equality lets the planner
        -- choose the primary key, and read the origin from its start.
        and f.id = (
            select j.id from {schema}.jobs j
            where j.origin = f.origin and j."group" >= f."group" and j."group" <= f."group"
            order by j."group", j.id limit 1
        )
),
starts as materialized (
    select origin, "group", id - 1 as after from heads
    union all
    -- Groups whose lane has just ended and has more behind it: no probe needed.
    select h.origin, h."group", h.after
    from unnest(%(next_origins)s::text[], %(next_groups)s::text[], %(next_ids)s::bigint[])
        as h(origin, "group", after)
    where h.origin in (select origin from own)
),
lanes as materialized (
    select s.origin, l.id from starts s cross join lateral (
        -- A lane ends before the first row that cannot run now: order is order.
        select q.id, bool_and(q.state = 'available' and q.type = any (%(types)s::text[]))
            over (order by q.id) as runs
        from (
            select j.id, j.type, j.state, j."group" from {schema}.jobs j
            where j.origin = s.origin
                and (j."group", j.id) > (s."group", s.after) and j."group" <= s."group"
            order by j."group", j.id
            -- Many groups: short lanes; one hot group: a long one.
            limit (
                select least(%(lane)s, greatest(2, %(room)s / count(*))) from starts
            )
        ) q
    ) l where l.runs
),
taken as materialized (
    select origin, id from ready where "group" is null
    union
    select origin, id from lanes
),
claimed as (
    insert into {schema}.claims (owner, seq, ids)
    select %(owner)s, %(seq)s, array_agg(id) from taken having count(*) > 0
)
select
    'job' as kind, t.origin, j.id, j.type, j."group", j.attempt, j.payload::text,
    j.run_at, j.enqueued_at, j.headers
from taken t
cross join lateral (
    select * from {schema}.jobs j where j.origin = t.origin and j.id = t.id offset 0
) j
union all
-- How far each window went, and how many rows it held: a full one is worth growing.
select 'cursor', l.origin, max(l.id), null, null, count(*), null, null, null, null
from looked l where not l.extra group by l.origin
union all
-- Rows passed over because their group is in flight: its lane must ask for more.
select distinct 'passed', f.origin, null::bigint, null, f."group", null::bigint, null,
    null::timestamptz, null::timestamptz, null::jsonb
from first f join busy b on b.origin = f.origin and b."group" = f."group"
union all
select 'unknown', l.origin, min(l.id), l.type, null, count(*), null, null, null, null
from looked l
where l.state = 'available' and l.type <> all (%(types)s::text[])
group by l.origin, l.type
order by 1, 2, 3

-- name: sweep
-- Rows behind the cursor that are available and not in flight: committed late, or
-- waiting in a group (the claim sorts those out). Reads only. The rows in flight are
-- left out after the limit, which leaves room for them: inside, they would turn the
-- walk along the index into a sort of all that lies behind the cursor.
select o.origin, s.id, s."group"
from unnest(%(origins)s::text[], %(lows)s::bigint[], %(cursors)s::bigint[])
    as o(origin, low, cursor)
cross join lateral (
    select j.id, j."group" from {schema}.jobs j
    where j.origin = o.origin and j.id > o.low and j.id <= o.cursor
        and j.state = 'available'
        and j.type = any (%(types)s::text[])
    order by j.id limit %(limit)s + cardinality(%(flying)s::bigint[])
) s
where not exists (
    select from unnest(%(flying)s::bigint[]) as f(id) where f.id = s.id
)

-- name: horizon
-- Once every transaction that was open at `xmax` has ended, nothing with an id drawn
-- before it can still appear.
select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint
from pg_current_snapshot() s

-- name: complete
with own as materialized (
    select o.origin from {schema}.origins o
    join unnest(%(owned)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = 'execute' and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o
),
completed as (
    delete from {schema}.jobs where ctid = any (array(
        -- One index look-up a row, whatever the statistics say of an emptied table.
        select row.ctid
        from unnest(%(origins)s::text[], %(ids)s::bigint[]) as d(origin, id)
        cross join lateral (
            select j.ctid from {schema}.jobs j
            where j.origin = d.origin and j.id = d.id offset 0
        ) row
        where d.origin in (select origin from own)
    ))
    returning id, origin, type, "group", attempt, enqueued_at
),
kept as (
    insert into {schema}.history (id, origin, type, "group", outcome, attempt, enqueued_at)
    select id, origin, type, "group", 'completed', attempt + 1, enqueued_at from completed
)
select id from completed

-- name: retry
-- A failed job goes to the future, with its error; the rest of its group waits behind it.
-- A snoozed or released one likewise, without a burnt attempt.
with own as materialized (
    select o.origin from {schema}.origins o
    join unnest(%(owned)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = 'execute' and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o
),
failed as materialized (
    select row.ctid as at, d.delay, d.error, d.burnt
    from unnest(
        %(origins)s::text[], %(ids)s::bigint[], %(delays)s::float8[], %(failures)s::text[],
        %(burnt)s::int[]
    ) as d(origin, id, delay, error, burnt)
    cross join lateral (
        select j.ctid from {schema}.jobs j
        where j.origin = d.origin and j.id = d.id offset 0
    ) row
    where d.origin in (select origin from own)
)
update {schema}.jobs j set
    state = 'scheduled',
    attempt = j.attempt + failed.burnt,
    run_at = clock_timestamp() + make_interval(secs => failed.delay),
    errors = case when failed.error is null then j.errors else (
        -- The last ten are kept: a job that fails for a month must not grow for a month.
        select jsonb_agg(e order by n) from (
            select e, n from jsonb_array_elements(
                coalesce(j.errors, '[]') || jsonb_build_object(
                    'attempt', j.attempt + failed.burnt,
                    'at', clock_timestamp(), 'error', failed.error
                )
            ) with ordinality as t(e, n) order by n desc limit 10
        ) last
    ) end
from failed where j.ctid = failed.at
returning j.id

-- name: discard
with own as materialized (
    select o.origin from {schema}.origins o
    join unnest(%(owned)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = 'execute' and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o
),
failed as materialized (
    select d.* from unnest(%(origins)s::text[], %(ids)s::bigint[], %(failures)s::text[])
        as d(origin, id, error)
    where d.origin in (select origin from own)
),
removed as (
    delete from {schema}.jobs j using failed f
    where j.origin = f.origin and j.id = f.id
    returning j.*, f.error
),
kept as (
    insert into {schema}.discarded
        (id, origin, type, "group", attempt, payload, enqueued_at, errors)
    select id, origin, type, "group", attempt + 1, payload, enqueued_at,
        coalesce(errors, '[]') || jsonb_build_object(
            'attempt', attempt + 1, 'at', clock_timestamp(), 'error', error
        )
    from removed
),
noted as (
    insert into {schema}.history (id, origin, type, "group", outcome, attempt, enqueued_at)
    select id, origin, type, "group", 'discarded', attempt + 1, enqueued_at from removed
)
select id from removed

-- name: end_claims
-- Claim rows whose jobs have all ended, and those of owners that are gone.
delete from {schema}.claims where owner = %(owner)s and seq = any (%(seqs)s::bigint[])

-- name: complete_own
select {schema}.complete_job(
    %(owner)s, %(origin)s, %(epoch)s, %(id)s, %(before)s::bigint[]
)
