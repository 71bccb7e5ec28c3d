-- Owners of origins, and living processes.

-- name: beat
-- This waits for a take-over that holds the row: see `lock_dead`.
insert into {schema}.processes (id, pod, roles, host, pid, version, types, topics, busy)
values (
    %(id)s, %(pod)s, %(roles)s, %(host)s, %(pid)s, %(version)s, %(types)s, %(topics)s,
    %(busy)s
)
on conflict (id) do update set
    heartbeat_at = clock_timestamp(), roles = excluded.roles, types = excluded.types,
    topics = excluded.topics, busy = excluded.busy

-- name: owned
-- Read what the process still owns: others may have taken some origins. It is a statement
-- of its own, after `beat`, so that its snapshot is from after any take-over that `beat`
-- has waited for.
select role, origin, epoch from {schema}.origins where owner = %(id)s

-- name: leave
-- This also frees its slots of limited types.
with given_back as (
    delete from {schema}.slots where owner = %(id)s
)
delete from {schema}.processes where id = %(id)s

-- name: abandon
-- Release everything without waiting for running jobs. An ordered end is no crash, and
-- jobs in origins without an owner are not charged with one. It waits for claims in
-- progress.
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
-- Delete processes that have been silent for long. A heartbeat in the future was written
-- before the server's clock was set back: it is set to now, and ages from then on. A
-- living process writes the next one, and a dead one counts as dead in time.
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
-- By the index: the table may contain one dead row for each claim ever made.
delete from {schema}.claims
where owner = any (array(select id from gone))
    and claimed_at < clock_timestamp() - make_interval(secs => %(after)s)

-- name: forget_orphaned_claims
-- Delete claims of processes that are deleted. It reads the whole table, so it runs
-- seldom.
delete from {schema}.claims c where not exists (
    select from {schema}.processes p where p.id = c.owner
) and c.claimed_at < clock_timestamp() - make_interval(secs => %(after)s)

-- name: end_silent_sessions
-- A process may stop in the middle of a transaction, or of a batch whose end it has not
-- sent. TCP does not notice, and its locks stay. So sessions that wait for a process that
-- counts as dead are ended. Behind PgBouncer no session can be assigned to a process.
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
    -- A time in the future is from before the server's clock was set back.
    and not a.state_change between
        clock_timestamp() - make_interval(secs => %(stale_after)s)
        and clock_timestamp() + interval '1 second'
group by d.id

-- name: live_processes
-- Topics count only for executors: shards have none.
select id, case when %(role)s like 'execute%%' then coalesce(topics, '{{}}') else '{{}}' end
from {schema}.processes p
where %(role)s = any (roles) and {alive}

-- part: runs_jobs
-- Whether the process p runs jobs, of any app.
exists (select from unnest(p.roles) as of(role) where of.role like 'execute%%')

-- name: lock_apps
-- If two apps start for the first time at once, one of them must be the first.
select pg_advisory_xact_lock(hashtextextended('apps', 7603))

-- name: name_role
-- The first app gets the role that earlier releases use. A running process of such a
-- release belongs to this app if they have types in common, and else to another one.
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
-- Find executors of other apps that know types of this one: both would run the same jobs.
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
-- The types that executors of other apps know.
select coalesce(array_agg(distinct known.type), '{{}}')
from {schema}.processes p cross join unnest(p.types) as known(type)
where {runs_jobs} and not %(role)s = any (p.roles)

-- name: strangers
-- Find executors that share the origins with this one, if each knows types that the
-- other lacks: each would own origins with jobs that only the other can run. Executors
-- without a common type come first.
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
-- The origins that have jobs.
select {schema}.job_origins()

-- part: dead
-- Whether the owner p is dead: its heartbeats have failed, but those of the asking
-- process have not. An outage that kept both from beating makes neither dead. After a
-- start of the server, processes first need time to beat. A time of start in the future
-- is from before the server's clock was set back.
p.heartbeat_at < clock_timestamp() - make_interval(secs => %(stale_after)s)
    and %(sees_others)s::bool
    and pg_postmaster_start_time() not between
        clock_timestamp() - make_interval(secs => %(stale_after)s) and clock_timestamp()

-- name: free_origins
-- Find wanted origins without a living owner: released ones, or those of dead processes.
select o.origin from {schema}.origins o
left join {schema}.processes p on p.id = o.owner
where o.role = %(role)s and o.origin = any (%(origins)s::text[])
    and (
        o.owner is null or p.id is null or o.owner = %(owner)s or ({dead})
    )

-- name: lock_origins
-- Lock in a fixed order, so that two take-overs never deadlock. This waits for commits in
-- flight (they share-lock the row), never for a running handler.
select o.origin, o.owner from {schema}.origins o
where o.role = %(role)s and o.origin = any (%(origins)s::text[])
order by o.origin
for update

-- name: lock_dead
-- Find the owners that are dead or deleted. `lock_origins` may have waited, and an owner
-- that stood still may have beaten meanwhile. The lock delays the heartbeats of the
-- others until the take-over has committed, so that their next heartbeat notices it. A
-- locked row belongs to a process that beats at this moment.
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
-- The last heartbeats of those processes that may be alive.
select id, heartbeat_at from {schema}.processes
where id = any (%(owners)s::uuid[])
    and heartbeat_at >= clock_timestamp() - make_interval(secs => %(stale_after)s)

-- name: take_origins
-- No owner gets the same epoch twice. Commits may have been lost, and its last epochs
-- with them: jobs that it still runs under a lost epoch must not pass for jobs of the
-- new one.
update {schema}.origins set
    owner = %(owner)s, epoch = greatest(epoch, %(last_epoch)s) + 1,
    since = clock_timestamp()
where role = %(role)s and origin = any (%(origins)s::text[])
returning origin, epoch

-- name: strip_claims
-- Remove the jobs that the previous owner had in flight in these origins from its
-- claims. An owner that releases an origin first takes its jobs out of its claims. So
-- jobs that are still there were cut off, and each of them may have killed its process.
-- This returns them, oldest first.
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
-- An exclusive lock: it waits for transactions that have enqueued jobs with groups, and
-- blocks new ones.
select pg_advisory_xact_lock(hashtextextended('home', 7603))

-- name: exports_in_progress
-- Re-exports write jobs whose origins were computed when the re-export began.
select r.id from {schema}.reexports r
where r.state in ('loading', 'running', 'paused') and exists (
    select from {schema}.reexport_ranges p where p.reexport_id = r.id and p.loaded_at is null
)

-- name: fence_origins
-- The owner of each origin must take it again, and then claims from its start.
update {schema}.origins set owner = null, epoch = epoch + 1, since = clock_timestamp()
where role like 'execute%%' and origin = any (%(origins)s::text[])

-- name: move_groups
-- Move jobs under the same ids, so that a group keeps its order. Jobs with a given origin
-- stay.
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
discarded as (
    -- When discarded jobs are retried, they must be with the new jobs of their groups.
    update {schema}.discarded d
    set origin = %(to)s || '/' || {schema}.place_group(d."group", %(after)s::int)
    where d.origin = %(from)s || '/' || {schema}.place_group(d."group", %(before)s::int)
    returning d.id, d.origin
),
moved as (
    update {schema}.jobs j set origin = m.target
    from moving m
    where m.target <> m.origin and j.origin = m.origin and j."group" = m."group"
    returning j.id, j.origin
),
kept as (
    update {schema}.kept_places k set origin = m.origin
    from (table moved union all table discarded) m where k.job_id = m.id
)
select count(*) from moved

-- name: set_partitions
update {schema}.topics set partitions = %(after)s where topic = %(topic)s

-- part: server
-- Identifies a server: its time of start, in microseconds since the epoch. After a
-- failover another server answers, and commits may be lost; after any restart they may
-- be, too.
(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint

-- name: read_server
select {server}

-- name: expect_server
-- Behind PgBouncer: if another server answers, this fails, and so do the statements sent
-- after it.
select case when {server} = %(server)s::bigint then 0
    else ('another server, started at ' || pg_postmaster_start_time())::int end

-- name: read_pods
-- Of a process that was killed, too: it stays a member of its groups for a while.
select distinct pod from {schema}.processes

-- name: read_installation
select id, shards, environment from {schema}.installation
