-- Poll for work: when idle, and now and then when busy.

-- name: look
-- Poll for work, cheaply enough to run when idle and now and then when busy. The orders
-- have no meaning of their own; they keep the planner on the index, because a wrong guess
-- of how soon it finds a row would let it read the table. If an old snapshot keeps ended
-- rows, a poll that is not `complete` begins above them.
select 'fresh' as kind, o.origin as name, null::float8 as delay
from unnest(%(origins)s::text[], %(cursors)s::bigint[]) as o(origin, cursor)
cross join lateral (
    select from {schema}.jobs j
    where j.origin = o.origin and j.id > o.cursor order by j.id limit 1
) fresh
union all
-- Seconds until the first is due; negative if it is due already. Other apps make their own
-- jobs available. So that their jobs of later times are not walked over each time, the poll
-- looks no further than `due_within` seconds; the next poll comes before that.
select 'due', o.origin, extract(epoch from d.run_at - clock_timestamp())::float8
from unnest(%(origins)s::text[], %(due_from)s::float8[]) as o(origin, due_from)
cross join lateral (
    select j.run_at from {schema}.jobs j
    where j.origin = o.origin and j.state = 'scheduled'
        and j.run_at >= to_timestamp(o.due_from)
        and j.run_at < statement_timestamp() + make_interval(secs => %(due_within)s)
        and j.type <> all (%(foreign)s::text[])
    order by j.run_at limit 1
) d
union all
-- Is there any job that is not of normal priority? Then each level has windows, too.
-- (No `exists`, which drops the order: where the statistics do not say that almost all
-- are normal, each poll would read the table, with all that an old snapshot keeps in it.)
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
-- Pauses of groups are left out, since there may be very many: a claim looks for those
-- of the groups that it meets.
select 'pause:' || p.kind, p.name, null from {schema}.pauses p
where p.kind = any (array['type', 'origin'])
union all
select 'resumes', r.count::text, null from {schema}.resumes r
union all
-- A job that ends without seeing its request leaves the request there for an hour. If there
-- are many, `find_cancelled` asks for the jobs in flight instead.
select * from (
    select 'cancel', c.id::text, null::float8 from {schema}.cancellations c
    limit %(cancelled)s
) asked
union all
-- The server's time, and how long the poll took.
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
-- next claim asks for them by id. `limit` bounds the round, not the backlog. The query reads
-- no rows before `due_from`, which have ended, and none that are not due; a clock that goes
-- on would not end the walk along the index. Jobs of other apps stay as they are: behind
-- its cursor their app would not see that they are available.
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
            and j.type <> all (%(foreign)s::text[])
        order by j.run_at limit %(limit)s
    ) d
)
-- By their place: the planner might look for an id from its origin's start.
update {schema}.jobs j set state = 'available'
where j.ctid = any (array(select due.place from due)) and j.state <> 'available'
returning j.origin, j.id, j."group", j.type
