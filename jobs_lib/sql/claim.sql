-- Look for jobs of the owned origins, and claim them. No claim changes a job row.
--
-- The statement `claim`, which asks for everything at once:
--
--   origins        jobs (the windows, and ids)
--      |                |
--      v                v
--     own ---------> looked -----> first -----> starts -----> lanes
--      |                |            |            ^             |
--      |                |            |            |             |
--      |      without a |            |    groups whose lane     | of groups
--      |          group |            |    has just ended        |
--      |                |            |                          |
--      |                +------------|-----------+--------------+
--      |                             |           |
--      |                             |           +---> claimed (a row of `claims`)
--      v                             v           v
--     5 ======================== 2, 9 ====== 0: jobs ==== and what else was seen
--
--   own       the origins that are still ours, locked against those who change jobs there
--   looked    the rows of the windows, one for each origin and level, and rows by id
--   first     of each group in `looked`: its first row that may run
--   starts    the groups in which a lane may begin, and the id behind which it does
--   lanes     the next rows of each of these groups, in order, and whether each may run
--   claimed   writes what is taken into one row of `claims`
--
-- The rows of the answer have the columns of `ClaimRow` (executor/claiming/rows.py), which
-- says what each kind means. They are made of these:
--
--    0 a job, claimed                 looked without a group, lanes
--    1 how far a window went          looked
--    2 a group is in flight           first
--    3 an unknown type                looked
--    4 a suspect that waits           looked, lanes
--    5 an origin that was skipped     the asked ones that are not in own
--    6 the next one that runs last    lanes, and one look-up behind each
--    7 a group goes on elsewhere      lanes (8: behind a lane of this claim)
--    9 a group's head is elsewhere    first without starts
--   10 passed over for its value      looked, lanes
--   11 passed over at a closed gate   looked, lanes

-- part: uncancelled
-- The statement's snapshot may be older than a cancellation, and would still show its
-- jobs. `o` is the row as it is locked, and `seen` is the row of the snapshot: a mark in
-- between differs. The mark is only compared with itself, since the table may come from
-- another server (a dump, a replica), whose transaction ids say nothing here.
(o.changed_by is null or o.changed_by = (
    select seen.changed_by from {schema}.origins seen
    where seen.role = o.role and seen.origin = o.origin
))

-- part: yields
-- Whether the group's head has failed and waits for its next attempt, while newer jobs of
-- its type wait, and the type runs last only: `f.lasts` has these types.
exists (
    select from (
        select j.type, j.state, j.attempt from {schema}.jobs j
        where j.origin = f.origin
            and (j."group", j.id) > (f."group", f.floor) and j."group" <= f."group"
        order by j."group", j.id limit 1
    ) head
    where head.state = 'scheduled' and head.attempt > 0 and head.type = any (f.lasts)
)

-- part: may_be_placed
-- Whether jobs that its handler enqueues may have to get its places: see `kept_places`.
(j.source is not null or j.unique_key is not null)

-- name: claim
-- The next jobs of the owned origins, without a write to any job row: the owner is alone
-- in its origins, so a cursor per origin says what it has looked at. Behind the cursor a
-- row is in flight, or stands behind an unfinished row of its group (the group's lane
-- reaches it), or was committed late (the sweep finds it).
with own as materialized (
    -- An origin that is being taken over is skipped, not waited for. So is one in which
    -- jobs were cancelled meanwhile.
    select o.origin from {schema}.origins o
    join unnest(%(origins)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = %(role)s and o.owner = %(owner)s and o.epoch = mine.epoch
        and {uncancelled}
    order by o.origin
    for share of o skip locked
),
looked as materialized (
    -- One branch per origin: `origin = any(…) order by id limit` would sort the backlog.
    select w.origin, 0::smallint as level, c.*
    from unnest(
        %(window_origins)s::text[], %(cursors)s::bigint[], %(sizes)s::bigint[]
    ) as w(origin, cursor, size)
    cross join lateral (
        select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid,
            {may_be_placed} as placed
            {read_value}
            {read_gate},
            -- The other priorities have windows of their own. A job that was in two
            -- crashes is a suspect, and runs with no other suspect beside it.
            j.state = 'available' and j.priority = 0 and j.crashes < 2
                and j.type = any (%(types)s::text[]) and {unfull} {if_opened} as runs
        from {schema}.jobs j
        where j.origin = w.origin and j.id > w.cursor order by j.id limit w.size
    ) c
    where w.origin in (select origin from own)
    union all
    select w.origin, w.level, c.*
    from unnest(
        %(level_origins)s::text[], %(levels)s::smallint[], %(level_cursors)s::bigint[],
        %(level_sizes)s::bigint[]
    ) as w(origin, level, cursor, size)
    cross join lateral (
        select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid,
            {may_be_placed} as placed
            {read_value}
            {read_gate},
            j.state = 'available' and j.crashes < 2 and j.type = any (%(types)s::text[])
                and {unfull} {if_opened}
        from {schema}.jobs j
        where j.origin = w.origin and j.priority = w.level and j.priority <> 0
            and j.id > w.cursor
        order by j.id limit w.size
    ) c
    where w.origin in (select origin from own)
    union all
    -- Promoted and late jobs, which lie behind the cursor.
    select x.origin, null, c.*
    from unnest(%(extra_origins)s::text[], %(extra_ids)s::bigint[]) as x(origin, id)
    cross join lateral (
        -- `offset 0` keeps the planner from turning this into a join over all rows.
        select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid,
            {may_be_placed} as placed
            {read_value}
            {read_gate},
            j.state = 'available' and (j.crashes < 2 or j.id = %(suspect)s)
                and j.type = any (%(types)s::text[]) and {unfull} {if_opened}
        from {schema}.jobs j where j.origin = x.origin and j.id = x.id offset 0
    ) c
    where x.origin in (select origin from own)
),
first as materialized (
    select f.*, least(coalesce(floor.id, 0), f.id - 1) as floor,
        busy.origin is not null as busy
    from (
        select origin, "group", min(id) as id,
            (array_agg(type order by id))[1] = any (%(last_types)s::text[]) as pile,
            array_agg(type) filter (where type = any (%(last_types)s::text[])) as lasts
        from looked
        where runs and "group" is not null group by origin, "group"
    ) f
    left join unnest(
        %(floor_origins)s::text[], %(floor_groups)s::text[], %(floor_ids)s::bigint[]
    ) as floor(origin, "group", id) using (origin, "group")
    left join unnest(%(busy_origins)s::text[], %(busy_groups)s::text[])
        as busy(origin, "group") using (origin, "group")
),
starts as materialized (
    select f.origin, f."group", f.id - 1 as after, f.pile from first f
    -- `offset 0`: by the index; a join might read all paused groups.
    where not exists (
            select from {schema}.pauses p
            where p.kind = 'group' and p.name = f."group" offset 0
        )
        -- A group with a lane in flight is left out: its next row would look like the
        -- head as soon as a handler's own transaction has completed the row before it.
        -- By a `case`: of two conditions the planner may look at the dearer one first.
        -- Written as a range, and without a bound on id alone: an equality lets the
        -- planner choose the primary key, and read the origin from its start. While an
        -- old snapshot is held, all rows that ended are still there to be walked over:
        -- it begins where some of the group may be left.
        and case when not f.busy then f.id = (
            select j.id from {schema}.jobs j
            where j.origin = f.origin
                and (j."group", j.id) > (f."group", f.floor) and j."group" <= f."group"
            order by j."group", j.id limit 1
        ) end
    union all
    -- Groups whose head has failed, and gives way to a newer one.
    select f.origin, f."group", f.floor, true from first f
    where f.lasts is not null and not f.busy
        and not exists (
            select from {schema}.pauses p
            where p.kind = 'group' and p.name = f."group" offset 0
        )
        and {yields}
    union all
    -- Groups whose lane has just ended and has more behind it: no probe needed.
    select h.origin, h."group", h.after, h.pile
    from unnest(
        %(next_origins)s::text[], %(next_groups)s::text[], %(next_ids)s::bigint[],
        %(next_piles)s::bool[]
    ) as h(origin, "group", after, pile)
    where h.origin in (select origin from own) and not exists (
        select from {schema}.pauses p
        where p.kind = 'group' and p.name = h."group" offset 0
    )
),
lanes as materialized (
    select s.origin, l.*, l.place = case when s.pile then 200 else size.k end as cut,
        l.able and (l.place = 1 or l.crashed < 2) as runs
    from (
        -- Many groups: short lanes; one hot group: a long one.
        select least(%(lane)s, greatest(2, %(room)s / greatest(count(*), 1))) as k
        from starts
    ) size
    cross join starts s cross join lateral (
        -- A lane ends before the first row that cannot run now, to keep the order. A
        -- job that runs last only may still be waiting: its newest one counts. A
        -- suspect is alone in its lane.
        select q.*, row_number() over by_id as place, max(q.crashes) over by_id as crashed,
            bool_and(
                q.type = any (%(types)s::text[])
                and (q.state = 'available' or q.type = any (%(last_types)s::text[]))
                and (q.crashes < 2 or q.id = %(suspect)s)
                {able_if_unfull}
                {able_if_opened}
            ) over by_id as able
        from (
            select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
                j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid,
                {may_be_placed} as placed
                {read_value}
                {read_gate}
            from {schema}.jobs j
            where j.origin = s.origin
                and (j."group", j.id) > (s."group", s.after) and j."group" <= s."group"
            order by j."group", j.id
            -- Only the last of these runs; one round trip supersedes this number.
            limit case when s.pile then 200 else size.k end
        ) q
        window by_id as (order by q."group", q.id)
    ) l
),
claimed as (
    insert into {schema}.claims (owner, seq, ids)
    select %(owner)s, %(seq)s, array_agg(id) from (
        select id from looked where runs and "group" is null
        union all
        select id from lanes where runs
    ) taken
    having count(*) > 0
        -- If the server crashes and loses this row, it loses only the note that these
        -- jobs may have been running: that is not worth waiting for the disk.
        and set_config('synchronous_commit', 'off', true) is not null
)
select 0 as kind, t.origin, t.id, t.type, t."group", t.attempt, t.crashes, t.priority,
    -- A large payload is read when its job starts: a batch of them must not fill the
    -- memory. A compressed one is measured unpacked, because it may be of any size.
    case
        when pg_column_compression(t.payload) is null and pg_column_size(t.payload) <= 8192
            or octet_length(t.payload::text) <= 8192
        then t.payload::text
    end as payload,
    t.run_at, date_part('epoch', t.enqueued_at) as enqueued, t.headers, t.cut,
    -- For jobs that run last only: whether the newest still waits, and the oldest's age.
    -- For others: whether they may be placed. A column of its own would cost each job more.
    case when t.type = any (%(last_types)s::text[])
        then t.state = 'scheduled' else t.placed end as delayed_or_placed,
    case when t.type = any (%(last_types)s::text[])
        then extract(epoch from clock_timestamp() - t.enqueued_at)::float8 end as age,
    {row_place}
    {value}
from (
    select origin, id, type, "group", attempt, crashes, priority, payload, run_at,
        enqueued_at, headers, state, tid, placed, false as cut
        {value}
        {record}
    from looked where runs and "group" is null
    union all
    select origin, id, type, "group", attempt, crashes, priority, payload, run_at,
        enqueued_at, headers, state, tid, placed, cut
        {value}
        {record}
    from lanes where runs
) t
union all
-- How far each window went, and how many rows it held: a full one has more behind it.
select 1, l.origin, max(l.id), null, null, count(*)::int, null, l.level, null, null, null,
    null, bool_and(l."group" is null), null, null, null
    {no_value}
from looked l where l.level is not null group by l.origin, l.level
union all
-- Rows passed over because their group is in flight: its lane must ask for more.
select 2, f.origin, f.id, null, f."group", null, null, null, null, null, null, null, null,
    null, null, null
    {no_value}
from first f where f.busy
union all
-- Types that no app knows.
select 3, l.origin, min(l.id), l.type, null, count(*)::int, null, null, null, null, null,
    null, null, null, null, null
    {no_value}
from looked l
where l.state = 'available' and l.type <> all (%(known)s::text[])
group by l.origin, l.type
union all
-- Suspects, which wait for their turn. Not those of types that may not run now: asked
-- for again and again, they would make one claim follow the other.
select 4, l.origin, l.id, null, null, null, null, null, null, null, null, null, null,
    null, null, null
    {no_value}
from (
    select origin, id, type, state, crashes, runs {room} {gate} from looked
    union all
    select origin, id, type, state, crashes, runs {room} {gate} from lanes
) l
where l.state = 'available' and l.crashes > 1 and not l.runs
    {suspect_if_unfull} {suspect_if_opened}
    and l.type = any (%(types)s::text[]) and l.type <> all (%(others)s::text[])
union all
-- For lanes that begin with a job that runs last only, and end before their group does:
-- the next job of its type, even if many jobs of other types are between.
select 6, h.origin, newer.id, h.type, h."group", null, null, null, null, null, null, null,
    null, null, null, null
    {no_value}
from (
    select l.origin, l."group", (array_agg(l.type order by l.place))[1] as type,
        max(l.id) filter (where l.runs) as last
    from lanes l where cardinality(%(last_types)s::text[]) > 0
    group by l.origin, l."group"
    having bool_or(l.cut or not l.runs)
) h
cross join lateral (
    select j.id from {schema}.jobs j
    where j.origin = h.origin and (j."group", j.id) > (h."group", h.last)
        and j."group" <= h."group" and j.type = h.type
        {newer_if_opened}
    order by j."group", j.id limit 1
) newer
where h.type = any (%(last_types)s::text[])
union all
-- Groups that go on with a type of `others`, which are claimed by themselves: at once,
-- and behind a lane of this claim.
select case when l.place = 1 then 7 else 8 end, l.origin, min(l.id), min(l.type),
    l."group", null, null, null, null, null, null, null, null, null, null, null
    {no_value}
from lanes l
where cardinality(%(others)s::text[]) > 0 and l.type = any (%(others)s::text[])
group by l.origin, l."group", l.place = 1
union all
-- Groups passed over behind a head that others may have in flight.
select 9, f.origin, f.id, null, f."group", null, null, null, null, null, null, null, null,
    null, null, null
    {no_value}
from first f
where cardinality(%(others)s::text[]) > 0 and not f.busy and not exists (
    select from starts s where s.origin = f.origin and s."group" = f."group"
)
{passed_for_value}
{passed_at_gate}
union all
-- Origins that were skipped: later claims ask again for their ids and groups.
select 5, m.origin, null, null, null, null, null, null, null, null, null, null, null, null,
    null, null
    {no_value}
from unnest(%(origins)s::text[]) as m(origin)
where m.origin not in (select origin from own)

-- name: payload
-- Of a job whose payload was too large to come with the claim.
select payload::text from {schema}.jobs where origin = %(origin)s and id = %(id)s
