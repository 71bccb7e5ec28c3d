-- Look for jobs of the owned origins, and claim them. No claim changes a job row.

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
