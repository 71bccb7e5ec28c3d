-- Who owns what, and who lives.

-- name: beat
-- Waits for a take-over that holds the row: see `lock_dead`.
insert into {schema}.processes (id, pod, roles, host, pid, version, types, topics, busy)
values (
    %(id)s, %(pod)s, %(roles)s, %(host)s, %(pid)s, %(version)s, %(types)s, %(topics)s,
    %(busy)s
)
on conflict (id) do update set
    heartbeat_at = clock_timestamp(), roles = excluded.roles, types = excluded.types,
    topics = excluded.topics, busy = excluded.busy

-- name: owned
-- What the process still owns: others may have taken some of it. A statement of its own,
-- behind `beat`: its snapshot is from after the take-over that `beat` has waited for.
select role, origin, epoch from {schema}.origins where owner = %(id)s

-- name: leave
-- The slots of limited types come free with it.
with given_back as (
    delete from {schema}.slots where owner = %(id)s
)
delete from {schema}.processes where id = %(id)s

-- name: abandon
-- Given back without waiting for what runs: an end that was ordered is no crash, and whose
-- origins have no owner is charged with none. Waits for the claims that are being made.
with released as (
    update {schema}.origins set owner = null, since = clock_timestamp()
    where owner = %(id)s
),
forgotten as (
    delete from {schema}.claims where owner = %(id)s
),
given_back as (
    delete from {schema}.slots where owner = %(id)s
)
delete from {schema}.processes where id = %(id)s

-- name: bury
-- Processes that have been silent for long: nobody asks about them any more. A heartbeat
-- of the future was written before the server's clock was set back. From now on it ages:
-- a process that lives writes the next one, and a dead one counts as dead in time.
with ahead as (
    select id from {schema}.processes
    where heartbeat_at > clock_timestamp() + interval '1 second'
    for update skip locked
),
aged as (
    update {schema}.processes p set heartbeat_at = clock_timestamp()
    from ahead where p.id = ahead.id
),
gone as (
    delete from {schema}.processes
    where heartbeat_at < clock_timestamp() - make_interval(secs => %(after)s)
    returning id
)
-- By the index: the table may hold one dead row for each claim ever made.
delete from {schema}.claims
where owner = any (array(select id from gone))
    and claimed_at < clock_timestamp() - make_interval(secs => %(after)s)

-- name: forget_orphaned_claims
-- Of processes that nobody knows any more. Reads the whole table, so it comes seldom.
delete from {schema}.claims c where not exists (
    select from {schema}.processes p where p.id = c.owner
) and c.claimed_at < clock_timestamp() - make_interval(secs => %(after)s)

-- name: end_silent_sessions
-- A process may stand still in the middle of a transaction, or of a batch whose end it has
-- not sent: TCP does not notice, and what it has locked nobody else gets. Those sessions
-- are ended that wait for a process that counts as dead. Behind PgBouncer none is known.
with dead as materialized (
    select id from {schema}.processes
    where heartbeat_at < clock_timestamp() - make_interval(secs => %(stale_after)s)
)
select d.id, count(pg_terminate_backend(a.pid))
from dead d
join pg_stat_activity a
    on right(a.application_name, 12) = left(replace(cast(d.id as text), '-', ''), 12)
where a.datname = current_database() and a.usename = current_user
    and a.xact_start is not null and a.wait_event = 'ClientRead'
    -- One of the future is older than the last change of the server's clock.
    and not a.state_change between
        clock_timestamp() - make_interval(secs => %(stale_after)s)
        and clock_timestamp() + interval '1 second'
group by d.id

-- name: live_processes
-- Whose topics count for executors alone: shards have none.
select id, case when %(role)s like 'execute%%' then coalesce(topics, '{{}}') else '{{}}' end
from {schema}.processes p
where %(role)s = any (roles) and {alive}

-- part: runs_jobs
-- Whether the process p executes, for whatever app.
exists (select from unnest(p.roles) as of(role) where of.role like 'execute%%')

-- name: lock_apps
-- Of two apps that start for the first time at once, one is the first.
select pg_advisory_xact_lock(hashtextextended('apps', 7603))

-- name: name_role
-- The first app gets the role that releases before this query know. One of those that
-- runs now belongs to this app if it has types in common with it, or to another one.
insert into {schema}.apps (name, role)
select %(app)s, case when exists (
        select from {schema}.apps a where a.role = 'execute'
    ) or exists (
        select from {schema}.processes p
        where 'execute' = any (p.roles) and {alive}
        having count(*) > 0 and not bool_or(p.types is null or p.types && %(types)s::text[])
    ) then 'execute:' || %(app)s else 'execute' end
on conflict (name) do nothing

-- name: read_role
select role from {schema}.apps where name = %(app)s

-- part: alive
p.heartbeat_at > clock_timestamp() - make_interval(secs => %(stale_after)s)

-- name: rivals
-- Executors of other apps that know types of this one: both would run the same jobs.
select p.pod, (
    select a.name from {schema}.apps a where a.role = any (p.roles)
), array(
    select own.type from unnest(%(types)s::text[]) as own(type)
    where own.type = any (p.types) order by 1
) from {schema}.processes p
where {runs_jobs} and not %(role)s = any (p.roles) and p.types && %(types)s::text[]
    and {alive}
order by p.pod limit 1

-- name: foreign_types
-- What the executors of other apps know.
select coalesce(array_agg(distinct known.type), '{{}}')
from {schema}.processes p cross join unnest(p.types) as known(type)
where {runs_jobs} and not %(role)s = any (p.roles)

-- name: strangers
-- Executors that share the origins with this one, where each knows types that the other
-- lacks: each keeps origins with jobs that only the other can run. Those that have no
-- type in common come first.
select pod, types from {schema}.processes p
where %(role)s = any (roles) and id <> %(id)s
    and coalesce(topics, '{{}}') = '{{}}' and types <> '{{}}'
    and not types <@ %(types)s::text[] and not types @> %(types)s::text[]
    and {alive}
order by types && %(types)s::text[], pod limit 1

-- name: make_origins
insert into {schema}.origins (role, origin)
select %(role)s, origin from unnest(%(origins)s::text[]) as o(origin)
on conflict do nothing

-- name: filled_origins
-- In which there are jobs.
select {schema}.job_origins()

-- part: dead
-- Whether the owner p is dead. Its heartbeats have failed, and those of the process that
-- asks have not: an outage that has kept both from beating makes nobody dead. To a server
-- that has just been started nobody could say that he lives. A time of start in the future
-- is from before the server's clock was set back.
p.heartbeat_at < clock_timestamp() - make_interval(secs => %(stale_after)s)
    and %(sees_others)s::bool
    and pg_postmaster_start_time() not between
        clock_timestamp() - make_interval(secs => %(stale_after)s) and clock_timestamp()

-- name: free_origins
-- Those of the wanted that nobody lives to defend: released, or of a dead process.
select o.origin from {schema}.origins o
left join {schema}.processes p on p.id = o.owner
where o.role = %(role)s and o.origin = any (%(origins)s::text[])
    and (
        o.owner is null or p.id is null or o.owner = %(owner)s or ({dead})
    )

-- name: lock_origins
-- In order, so that two take-overs never wait for each other in a circle. Waits for
-- commits in flight (they share-lock the row), never for a handler that is running.
select o.origin, o.owner from {schema}.origins o
where o.role = %(role)s and o.origin = any (%(origins)s::text[])
order by o.origin
for update

-- name: lock_dead
-- Those of the owners that are dead, or gone. `lock_origins` may have waited: an owner that
-- stood still may have beaten meanwhile. The lock keeps the others from beating until the
-- take-over has committed, so that their next heartbeat hears of it. A row that is locked
-- is of a process that beats in this moment.
with silent as materialized (
    select p.id from {schema}.processes p
    where p.id = any (%(owners)s::uuid[]) and {dead}
    for share of p skip locked
)
select id from silent
union all
select o.id from unnest(%(owners)s::uuid[]) as o(id)
where not exists (select from {schema}.processes p where p.id = o.id)

-- name: heartbeats
-- The last ones of those of the processes that may be alive.
select id, heartbeat_at from {schema}.processes
where id = any (%(owners)s::uuid[])
    and heartbeat_at >= clock_timestamp() - make_interval(secs => %(stale_after)s)

-- name: take_origins
-- No owner has an epoch twice. Commits may have been lost, and its last epochs with them:
-- what it still runs under one of those must not take it for the new one.
update {schema}.origins set
    owner = %(owner)s, epoch = greatest(epoch, %(last_epoch)s) + 1,
    since = clock_timestamp()
where role = %(role)s and origin = any (%(origins)s::text[])
returning origin, epoch

-- name: strip_claims
-- What the owner before had in flight in these origins is nobody's now. An owner that
-- gives an origin back takes its jobs out of its claims first: what is still there was
-- cut off, and each of these jobs may be the one that killed its process. Returns them,
-- oldest first.
with cut as materialized (
    select distinct row.origin, row.id
    from {schema}.claims c
    cross join unnest(c.ids) as running(id)
    cross join unnest(%(origins)s::text[]) as taken(origin)
    cross join lateral (
        select j.origin, j.id from {schema}.jobs j
        where j.origin = taken.origin and j.id = running.id offset 0
    ) row
    where c.owner = any (%(owners)s::uuid[])
),
counted as (
    update {schema}.jobs j set crashes = least(j.crashes + 1, 30000)
    from cut where j.origin = cut.origin and j.id = cut.id
),
stripped as (
    update {schema}.claims c set ids = array(
        select running.id from unnest(c.ids) as running(id)
        where running.id not in (select cut.id from cut)
    )
    where c.owner = any (%(owners)s::uuid[])
)
select id, origin from cut order by id

-- name: release_origins
update {schema}.origins set owner = null, since = clock_timestamp()
where role = %(role)s and owner = %(owner)s and origin = any (%(origins)s::text[])

-- name: owned_origins
select origin, epoch from {schema}.origins
where role = %(role)s and owner = %(owner)s

-- name: read_topics
select topic, partitions, home from {schema}.topics

-- name: declare_topic
insert into {schema}.topics (topic, partitions) values (%(topic)s, %(partitions)s)
on conflict do nothing

-- name: has_jobs
select exists (select from {schema}.jobs)

-- name: unset_home
update {schema}.topics set home = false where home

-- name: set_home
update {schema}.topics set home = true where topic = %(topic)s

-- name: wait_for_locks
select set_config('lock_timeout', %(milliseconds)s, true)

-- name: lock_home
-- Alone: waits for the transactions that have enqueued jobs with groups, and keeps off
-- those that would.
select pg_advisory_xact_lock(hashtextextended('home', 7603))

-- name: exports_in_progress
-- They write jobs whose origins were computed when they began.
select r.id from {schema}.reexports r
where r.state in ('loading', 'running', 'paused') and exists (
    select from {schema}.reexport_ranges p where p.reexport_id = r.id and p.loaded_at is null
)

-- name: fence_origins
-- Whoever owns one has to take it again, and looks at it from its start.
update {schema}.origins set owner = null, epoch = epoch + 1, since = clock_timestamp()
where role like 'execute%%' and origin = any (%(origins)s::text[])

-- name: move_groups
-- Under the same ids: a group keeps its order. What was given an origin of its own stays.
with groups as materialized (
    select distinct j.origin, j."group" from {schema}.jobs j
    where j.origin = any (%(origins)s::text[]) and j."group" is not null
),
moving as materialized (
    select g.origin, g."group",
        %(to)s || '/' || {schema}.place_group(g."group", %(after)s::int) as target
    from groups g
    where g.origin = %(from)s || '/' || {schema}.place_group(g."group", %(before)s::int)
),
kept as (
    -- Discarded jobs lie with the new ones of their groups when they are retried.
    update {schema}.discarded d
    set origin = %(to)s || '/' || {schema}.place_group(d."group", %(after)s::int)
    where d.origin = %(from)s || '/' || {schema}.place_group(d."group", %(before)s::int)
)
update {schema}.jobs j set origin = m.target
from moving m
where m.target <> m.origin and j.origin = m.origin and j."group" = m."group"

-- name: set_partitions
update {schema}.topics set partitions = %(after)s where topic = %(topic)s

-- part: server
-- Tells servers apart: microseconds since the epoch at which this one was started. After a
-- failover it is another one, and commits may be lost; so it may be after any restart.
(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint

-- name: read_server
select {server}

-- name: expect_server
-- Behind PgBouncer: fails, and what is sent behind it with it.
select case when {server} = %(server)s::bigint then 0
    else ('another server, started at ' || pg_postmaster_start_time())::int end

-- name: read_installation
select id, shards, environment from {schema}.installation
