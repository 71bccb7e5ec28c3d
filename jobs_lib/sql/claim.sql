-- Look for jobs of the owned origins, and claim them. No claim changes a job row.

-- name: look
-- What there is to do, asked when idle and now and then when busy: cheap enough for that.
-- The orders mean nothing here; they keep the planner on the index, where a wrong guess
-- of how soon a row is found would let it read the table. Where an old snapshot keeps what
-- has ended, a look that is not `complete` begins above that.
select 'fresh' as kind, o.origin as name, null::float8 as delay
from unnest(%(origins)s::text[], %(cursors)s::bigint[]) as o(origin, cursor)
cross join lateral (
    select from {schema}.jobs j
    where j.origin = o.origin and j.id > o.cursor order by j.id limit 1
) fresh
union all
-- Seconds until the first is due; negative for what is due already.
select 'due', o.origin, extract(epoch from d.run_at - clock_timestamp())::float8
from unnest(%(origins)s::text[], %(due_from)s::float8[]) as o(origin, due_from)
cross join lateral (
    select j.run_at from {schema}.jobs j
    where j.origin = o.origin and j.state = 'scheduled'
        and j.run_at >= to_timestamp(o.due_from)
    order by j.run_at limit 1
) d
union all
-- Is there any job that is not of normal priority? Then each level has windows, too.
-- (No `exists`, which drops the order: where the statistics do not say that almost all
-- are normal, each look would read the table, with all that an old snapshot keeps in it.)
select 'priority', null, null from (
    select from {schema}.jobs j
    where j.priority <> 0 order by j.origin, j.priority, j.id limit 1
) other
where %(complete)s
union all
select 'priority', o.origin, null
from unnest(
    %(level_origins)s::text[], %(levels)s::smallint[], %(level_cursors)s::bigint[]
) as o(origin, level, cursor)
cross join lateral (
    select from {schema}.jobs j
    where j.origin = o.origin and j.priority = o.level and j.priority <> 0
        and j.id > o.cursor
    order by j.id limit 1
) other
union all
-- Not of groups, of which there may be very many: a claim looks for those that it meets.
select 'pause:' || p.kind, p.name, null from {schema}.pauses p
where p.kind = any (array['type', 'origin'])
union all
select 'resumes', r.count::text, null from {schema}.resumes r
union all
-- What has ended without looking at its request leaves it there for an hour: where there
-- are many, the jobs in flight are asked for instead, by `find_cancelled`.
select * from (
    select 'cancel', c.id::text, null::float8 from {schema}.cancellations c
    limit %(cancelled)s
) asked
union all
-- The server's time, and how much of it the look took.
select 'clock', extract(epoch from clock_timestamp())::text,
    extract(epoch from clock_timestamp() - statement_timestamp())::float8

-- name: find_cancelled
-- One look-up for each job in flight, whatever the statistics say of the table.
select f.id from unnest(%(ids)s::bigint[]) as f(id)
cross join lateral (
    select from {schema}.cancellations c where c.id = f.id offset 0
) asked

-- name: promote
-- Makes due jobs available again and returns them: they lie behind the cursor, so the
-- next claim is told of them. `limit` bounds the round, not the backlog. Neither what lies
-- before `due_from`, which has ended, nor what is not due is read; a clock that goes on
-- would not end the walk along the index.
with own as materialized (
    select o.origin, mine.due_from from {schema}.origins o
    join unnest(%(origins)s::text[], %(epochs)s::bigint[], %(due_from)s::float8[])
        as mine(origin, epoch, due_from) using (origin)
    where o.role = %(role)s and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o skip locked
),
due as materialized (
    select d.* from own cross join lateral (
        select j.ctid as place from {schema}.jobs j
        where j.origin = own.origin and j.state = 'scheduled'
            and j.run_at >= to_timestamp(own.due_from)
            and j.run_at <= statement_timestamp()
        order by j.run_at limit %(limit)s
    ) d
)
-- Where they lie: the planner might look for an id from its origin's start.
update {schema}.jobs j set state = 'available'
where j.ctid = any (array(select due.place from due)) and j.state <> 'available'
returning j.origin, j.id, j."group", j.type

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
-- Whether the group's head has failed and waits for its next attempt, while newer ones of
-- its type wait that run last only: `f.lasts` are the types of such ones.
exists (
    select from (
        select j.type, j.state, j.attempt from {schema}.jobs j
        where j.origin = f.origin
            and (j."group", j.id) > (f."group", f.floor) and j."group" <= f."group"
        order by j."group", j.id limit 1
    ) head
    where head.state = 'scheduled' and head.attempt > 0 and head.type = any (f.lasts)
)

-- part: read_value

-- part: read_value_limited
-- Where a type is limited by a field of its payload: see `claim_limited`. All other
-- claims pay nothing for it.
, {value_of_field} as value, {unfull} as unfull

-- part: able_if_unfull

-- part: able_if_unfull_limited
and q.unfull

-- part: plain_if_unfull

-- part: plain_if_unfull_limited
and r.unfull

-- part: value

-- part: value_limited
, value

-- part: no_value

-- part: no_value_limited
, null

-- part: passed_for_value

-- part: passed_for_value_limited
union all
-- Passed over for their value alone: they come back when fewer of it wait.
select 10, l.origin, l.id, null, null, null, null, null, null, null, null, null, null,
    null, null, null, l.value
from (
    select origin, id, type, state, value, unfull from looked
    union all
    select origin, id, type, state, value, unfull from lanes
) l
where not l.unfull and l.state = 'available' and l.type = any (%(types)s::text[])

-- part: full_of_value
'{{}}'::bigint[], '{{}}'::text[]

-- part: full_of_value_limited
-- Passed over for their value alone, and those values.
array(select unnest(f.full_ids) from first f where f.full_ids is not null),
array(select unnest(f.full_values) from first f where f.full_ids is not null)

-- part: gather_full

-- part: gather_full_limited
, array_agg(r.id order by r.id) filter (where r.full) as full_ids
, array_agg(r.value order by r.id) filter (where r.full) as full_values

-- part: read_full

-- part: read_full_limited
, {value_of_field} as value
, j.state = 'available' and j.priority = 0
    and j.type <> all (%(skipped_types)s::text[]) and not ({unfull}) as full

-- part: unfull
true

-- part: unfull_limited
-- Not of a value of which as many wait in memory as may: what is passed over so comes
-- back by its id, as `refilled`. By a hash, since there may be very many of them.
case when cardinality(%(full)s::text[]) = 0 then true else
    j.id = any (%(refilled)s::bigint[])
    or {value_of_field} not in (select unnest(%(full)s::text[]))
end

-- part: value_of_field
coalesce(j.payload ->> %(field)s::text, '')

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
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid
            {read_value},
            -- The other priorities have windows of their own. A job that was in two
            -- crashes is a suspect, and runs with no other suspect beside it.
            j.state = 'available' and j.priority = 0 and j.crashes < 2
                and j.type = any (%(types)s::text[]) and {unfull} as runs
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
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid
            {read_value},
            j.state = 'available' and j.crashes < 2 and j.type = any (%(types)s::text[])
                and {unfull}
        from {schema}.jobs j
        where j.origin = w.origin and j.priority = w.level and j.priority <> 0
            and j.id > w.cursor
        order by j.id limit w.size
    ) c
    where w.origin in (select origin from own)
    union all
    -- Promoted and late ones, which lie behind the cursor.
    select x.origin, null, c.*
    from unnest(%(extra_origins)s::text[], %(extra_ids)s::bigint[]) as x(origin, id)
    cross join lateral (
        -- `offset 0` keeps the planner from turning this into a join over all rows.
        select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
            j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid
            {read_value},
            j.state = 'available' and (j.crashes < 2 or j.id = %(suspect)s)
                and j.type = any (%(types)s::text[]) and {unfull}
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
    -- `offset 0`: by the index, where a join might read all that are paused.
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
        -- A lane ends before the first row that cannot run now: order is order. What
        -- runs last only may be waiting still: its newest is what counts. A suspect is
        -- alone in its lane.
        select q.*, row_number() over by_id as place, max(q.crashes) over by_id as crashed,
            bool_and(
                q.type = any (%(types)s::text[])
                and (q.state = 'available' or q.type = any (%(last_types)s::text[]))
                and (q.crashes < 2 or q.id = %(suspect)s)
                {able_if_unfull}
            ) over by_id as able
        from (
            select j.id, j.type, j."group", j.attempt, j.crashes, j.priority, j.payload,
                j.run_at, j.enqueued_at, j.headers, j.state, j.ctid as tid
                {read_value}
            from {schema}.jobs j
            where j.origin = s.origin
                and (j."group", j.id) > (s."group", s.after) and j."group" <= s."group"
            order by j."group", j.id
            -- Of a pile only the last runs: so many are superseded in a round trip.
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
        -- If the server crashes and forgets this row, only the note is lost that these
        -- jobs may have been running: not worth a wait for the disk.
        and set_config('synchronous_commit', 'off', true) is not null
)
select 0 as kind, t.origin, t.id, t.type, t."group", t.attempt, t.crashes, t.priority,
    -- A large payload is read when its job starts: a batch of them must not fill the
    -- memory. What is compressed is looked into, since it may be anything.
    case
        when pg_column_compression(t.payload) is null and pg_column_size(t.payload) <= 8192
            or octet_length(t.payload::text) <= 8192
        then t.payload::text
    end,
    t.run_at, date_part('epoch', t.enqueued_at), t.headers, t.cut,
    -- Of what runs last only: is the newest still waiting, and how long did the oldest?
    t.state = 'scheduled',
    case when t.type = any (%(last_types)s::text[])
        then extract(epoch from clock_timestamp() - t.enqueued_at)::float8 end,
    -- Where the row lies: its completion finds it there without the index.
    t.tid::text
    {value}
from (
    select origin, id, type, "group", attempt, crashes, priority, payload, run_at,
        enqueued_at, headers, state, tid, false as cut
        {value}
    from looked where runs and "group" is null
    union all
    select origin, id, type, "group", attempt, crashes, priority, payload, run_at,
        enqueued_at, headers, state, tid, cut
        {value}
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
select 3, l.origin, min(l.id), l.type, null, count(*)::int, null, null, null, null, null,
    null, null, null, null, null
    {no_value}
from looked l
where l.state = 'available' and l.type <> all (%(known)s::text[])
group by l.origin, l.type
union all
-- Suspects, who wait for their turn.
select 4, l.origin, l.id, null, null, null, null, null, null, null, null, null, null,
    null, null, null
    {no_value}
from (
    select origin, id, type, state, crashes, runs from looked
    union all
    select origin, id, type, state, crashes, runs from lanes
) l
where l.state = 'available' and l.crashes > 1 and not l.runs
    and l.type <> all (%(others)s::text[])
union all
-- Of lanes that begin with what runs last only, and end before all of their group: the
-- next one of its type, however much of other types stands between.
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
union all
-- Origins that were skipped: what was asked for in them is asked for again.
select 5, m.origin, null, null, null, null, null, null, null, null, null, null, null, null,
    null, null
    {no_value}
from unnest(%(origins)s::text[]) as m(origin)
where m.origin not in (select origin from own)

-- name: claim_plain
-- The same for one origin in which something new has just come, as long as that is plain:
-- no group, no other priority, no suspect, no unknown type. A plan of a tenth of the
-- size starts in a third of the time, and between an enqueue and its run time counts.
with own as materialized (
    select o.origin from {schema}.origins o
    where o.role = %(role)s and o.origin = %(origin)s
        and o.owner = %(owner)s and o.epoch = %(epoch)s
        and {uncancelled}
    for share of o skip locked
),
looked as materialized (
    select r.*, bool_and(
        r."group" is null and r.priority = 0 and r.crashes < 2
        and r.type = any (%(types)s::text[]) {plain_if_unfull}
    ) over (order by r.id) as plain
    from (
        select j.*, j.ctid as tid {read_value}
        from {schema}.jobs j
        where j.origin = %(origin)s and j.id > %(cursor)s
        order by j.id limit %(size)s
    ) r
    where exists (select from own)
),
claimed as (
    insert into {schema}.claims (owner, seq, ids)
    select %(owner)s, %(seq)s, array_agg(id) from looked
    where plain and state = 'available'
    having count(*) > 0 and set_config('synchronous_commit', 'off', true) is not null
)
select 0 as kind, l.origin, l.id, l.type, l."group", l.attempt, l.crashes, l.priority,
    case
        when pg_column_compression(l.payload) is null and pg_column_size(l.payload) <= 8192
            or octet_length(l.payload::text) <= 8192
        then l.payload::text
    end,
    l.run_at, date_part('epoch', l.enqueued_at), l.headers, false, false, null::float8,
    l.tid::text
    {value}
from looked l where l.plain and l.state = 'available'
union all
select case when exists (select from own) then 1 else 5 end, %(origin)s,
    max(l.id) filter (where l.plain), null, null, count(*)::int, null, 0, null, null, null,
    null, bool_and(l.plain), null, null, null
    {no_value}
from looked l having count(*) > 0 or not exists (select from own)

-- name: jump
-- Where windows held nothing to run: the next rows further on that a claim might take,
-- and how far this has looked. Most rows are behind another one of their group, which the
-- same rows show, or else one probe for each group. Reads no more than `limit` rows, so
-- that no round takes long.
with first as materialized (
    select r."group", min(r.id) as head, min(r.id) filter (where r.free) as id,
        min(r.id) filter (where r.free and r.last) as last_id,
        array_agg(r.type) filter (where r.free and r.last) as lasts,
        max(r.id) as furthest, count(*) as count
        {gather_full}
    from (
        select j.id, j."group", j.type, j.type = any (%(last_types)s::text[]) as last,
            j.state = 'available' and j.priority = 0
                and j.type <> all (%(skipped_types)s::text[]) and {unfull} as free
            {read_full}
        from {schema}.jobs j
        where j.origin = %(origin)s and j.id > %(cursor)s order by j.id limit %(limit)s
    ) r
    -- What has no group is on its own.
    group by r."group", case when r."group" is null then r.id end
),
candidates as materialized (
    select %(origin)s::text as origin, f."group", c.id, c.lasts,
        least(coalesce(floor.id, 0), c.id - 1) as floor
    from first f
    cross join lateral (
        select f.id, null::text[] as lasts where f.id = f.head
        union all
        -- To it the group's head may give way.
        select f.last_id, f.lasts where f."group" is not null and f.last_id is not null
    ) c
    left join unnest(%(floor_groups)s::text[], %(floor_ids)s::bigint[])
        as floor("group", id) using ("group")
    left join unnest(%(groups)s::text[]) as busy("group") using ("group")
    where busy."group" is null
    order by c.id
)
select
    array(
        -- In the order in which they were stored, up to the last that there is room for.
        select f.id from candidates f
        where case
            when f."group" is null then true
            when exists (
                select from {schema}.pauses p
                where p.kind = 'group' and p.name = f."group" offset 0
            ) then false
            when f.lasts is not null then {yields}
            else f.id = (
                select j.id from {schema}.jobs j
                where j.origin = %(origin)s
                    and (j."group", j.id) > (f."group", f.floor)
                    and j."group" <= f."group"
                order by j."group", j.id limit 1
            )
        end
        limit %(room)s
    ),
    (select max(furthest) from first),
    (select coalesce(sum(count), 0)::bigint from first),
    {full_of_value}

-- name: payload
-- Of a job whose payload was too large to come with the claim.
select payload::text from {schema}.jobs where origin = %(origin)s and id = %(id)s

-- name: sweep
-- Rows behind the cursor that are available and not in flight: committed late, or heads of
-- groups that wait (the claim sorts those out). Reads only, a slice at a time. The rows in
-- flight are left out after the limit, which leaves room for them: inside, they would
-- turn the walk along the index into a sort of all that lies behind the cursor.
with slice as materialized (
    select o.origin, s.id, s."group", s.type from unnest(
        %(origins)s::text[], %(starts)s::bigint[], %(ends)s::bigint[],
        %(highs)s::bigint[], %(batches)s::bigint[]
    ) as o(origin, start, "end", high, batch)
    cross join lateral (
        select j.id, j."group", j.type from {schema}.jobs j
        where j.origin = o.origin and j.id > o.start and j.id <= o."end"
            and j.state = 'available'
            -- What its own priority's windows have not come to is not late.
            and (j.priority = 0 or j.id <= case j.priority when 1 then o.high else o.batch end)
            and j.type = any (%(types)s::text[])
        order by j.id desc limit %(limit)s
    ) s
)
select s.origin, s.id, s."group", null::int
from slice s
left join unnest(%(busy_origins)s::text[], %(busy_groups)s::text[])
    as busy(origin, "group") using (origin, "group")
where not exists (select from unnest(%(flying)s::bigint[]) as f(id) where f.id = s.id)
    -- What stands behind another row of its group comes with that one. But a lane in
    -- flight does not look back. The nearest row before it is asked for: further up there
    -- may be thousands that have ended, as long as an old snapshot is held.
    and case when s."group" is not null and busy.origin is null then (
        select j.id from {schema}.jobs j
        where j.origin = s.origin and (j."group", j.id) < (s."group", s.id)
            and j."group" >= s."group"
        order by j."group" desc, j.id desc limit 1
    ) is null
        -- Or a failed one gives way to it: see `yields`. Of that one's type it is the
        -- first to come, so the two hardly ever stand apart.
        or s.type = any (%(last_types)s::text[]) and exists (
            select from (
                select j.type, j.state, j.attempt from {schema}.jobs j
                where j.origin = s.origin and (j."group", j.id) < (s."group", s.id)
                    and j."group" >= s."group"
                order by j."group" desc, j.id desc limit 1
            ) before
            where before.state = 'scheduled' and before.attempt > 0
                and before.type = s.type
        )
        else true end
union all
-- How far it went.
select s.origin, min(s.id), null, count(*)::int from slice s group by s.origin
union all
-- How long it took the server, in microseconds: how long the network takes, and how long
-- the answer lies unread, costs nobody anything.
select null, (extract(epoch from clock_timestamp() - statement_timestamp()) * 1e6)::bigint,
    null, null

-- name: horizon
-- Once every transaction that was open at `xmax` has ended, nothing with an id drawn
-- before it can still appear.
select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint,
    array(select running::text::bigint from pg_snapshot_xip(s) as running)
from pg_current_snapshot() s
