-- The queries of operators: list, show, cancel, pause, retry and delete jobs.

-- name: bound_statements
-- For this transaction only: a session's settings do not last behind PgBouncer.
select
    set_config('statement_timeout', %(statement_ms)s, true),
    set_config('lock_timeout', %(lock_ms)s, true),
    -- Each query has other filters, and so needs another plan.
    set_config('plan_cache_mode', 'force_custom_plan', true)

-- name: bound_idleness
-- A process that is stopped between two statements must not keep its locks from others.
select set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true)

-- name: list_unfinished
-- One branch for each origin; each walks its index from the first id wanted.
with claimed as materialized (
    select distinct r.id from {schema}.claims c cross join lateral unnest(c.ids) as r(id)
)
select
    j.id, j.type, j.origin, j."group", j.derived, j.attempt, j.priority, j.run_at,
    j.enqueued_at, j.errors -> -1 ->> 'error'
from {schema}.job_origins() as o(origin)
cross join lateral (
    select d.* from (
        select
            -- Columns by name, here and below: a role that only reads may not read
            -- payloads.
            j.id, j.type, j.origin, j."group", j.attempt, j.priority, j.run_at,
            j.enqueued_at, j.errors,
            case
                when j.state = 'scheduled' then 'scheduled'
                when exists (select from claimed c where c.id = j.id) then 'running'
                when j."group" is not null and exists (
                    select from {schema}.jobs e
                    where e.origin = j.origin and e."group" = j."group" and e.id < j.id
                ) then 'waiting'
                else 'available'
            end as derived
        from {schema}.jobs j
        where j.origin = o.origin and j.id > %(after)s
            and (%(type)s::text is null or j.type = %(type)s)
            and (%(group)s::text is null or j."group" = %(group)s)
    ) d
    where %(state)s::text is null or d.derived = %(state)s
    order by d.id limit %(limit)s
) j
where %(origin)s::text is null or o.origin = %(origin)s
order by j.id limit %(limit)s

-- name: list_scheduled
-- The jobs that are due next come first. A page goes on behind a job that was due at `at`.
select
    j.id, j.type, j.origin, j."group", 'scheduled', j.attempt, j.priority, j.run_at,
    j.enqueued_at, j.errors -> -1 ->> 'error'
from {schema}.job_origins() as o(origin)
cross join lateral (
    select j.id, j.type, j.origin, j."group", j.attempt, j.priority, j.run_at,
        j.enqueued_at, j.errors
    from {schema}.jobs j
    where j.origin = o.origin and j.state = 'scheduled'
        and (%(type)s::text is null or j.type = %(type)s)
        and (%(group)s::text is null or j."group" = %(group)s)
        and (
            %(at)s::timestamptz is null
            -- The first condition alone lets the index of due times begin there.
            or j.run_at >= %(at)s and (j.run_at, j.id) > (%(at)s, %(after)s)
        )
    order by j.run_at, j.id limit %(limit)s
) j
where %(origin)s::text is null or o.origin = %(origin)s
order by j.run_at, j.id limit %(limit)s

-- name: place_in_scheduled
select j.run_at from {schema}.find_jobs(array[%(after)s]) f
cross join lateral (
    select j.run_at, j.state from {schema}.jobs j
    where j.origin = f.origin and j.id = f.id offset 0
) j
where j.state = 'scheduled'

-- name: list_running
-- From the claims, which are few, to the jobs; claimed jobs may have ended since.
select
    j.id, j.type, j.origin, j."group", 'running', j.attempt, j.priority, j.run_at,
    j.enqueued_at, j.errors -> -1 ->> 'error'
from (
    select distinct o.origin, r.id from {schema}.claims c
    join {schema}.origins o on o.role like 'execute%%' and o.owner = c.owner
    cross join lateral unnest(c.ids) as r(id)
    where r.id > %(after)s
) f
join lateral (
    select j.id, j.type, j.origin, j."group", j.state, j.attempt, j.priority, j.run_at,
        j.enqueued_at, j.errors
    from {schema}.jobs j where j.origin = f.origin and j.id = f.id offset 0
) j on true
where j.state = 'available'
    and (%(type)s::text is null or j.type = %(type)s)
    and (%(group)s::text is null or j."group" = %(group)s)
    and (%(origin)s::text is null or j.origin = %(origin)s)
order by j.id limit %(limit)s

-- name: list_discarded
select
    d.id, d.type, d.origin, d."group", 'discarded', d.attempt, d.priority,
    d.discarded_at, d.enqueued_at, d.errors -> -1 ->> 'error'
from {schema}.discarded d
where d.id > %(after)s
    and (%(type)s::text is null or d.type = %(type)s)
    and (%(group)s::text is null or d."group" = %(group)s)
    and (%(origin)s::text is null or d.origin = %(origin)s)
    and (%(since)s::timestamptz is null or d.discarded_at >= %(since)s)
    -- Compare it literally: a pattern could be made slow.
    and (
        %(error)s::text is null
        or strpos(lower(d.errors -> -1 ->> 'error'), lower(%(error)s)) > 0
    )
order by d.id limit %(limit)s

-- name: list_history
-- The latest first. A page goes on behind a job that ended at `at`.
select
    h.id, h.type, h.origin, h."group", h.outcome, h.attempt, null::smallint,
    h.finished_at, h.enqueued_at, null
from {schema}.history h
where h.outcome = %(state)s
    and (%(at)s::timestamptz is null or (h.finished_at, h.id) < (%(at)s, %(after)s))
    and (%(type)s::text is null or h.type = %(type)s)
    and (%(group)s::text is null or h."group" = %(group)s)
    and (%(origin)s::text is null or h.origin = %(origin)s)
    and (%(since)s::timestamptz is null or h.finished_at >= %(since)s)
order by h.finished_at desc, h.id desc limit %(limit)s

-- name: place_in_history
select h.finished_at from {schema}.history h
where h.id = %(after)s and h.outcome = %(state)s
order by h.finished_at desc limit 1

-- name: show_unfinished
select
    s.id, s.type, s.origin, s."group", s.derived_state, s.attempt, s.priority,
    s.payload, s.headers, s.unique_key, s.enqueued_at, s.run_at, null::timestamptz,
    s.errors, p.pod
from {schema}.find_jobs(array[%(id)s]) f
cross join lateral (
    select * from {schema}.job_states s where s.origin = f.origin and s.id = f.id offset 0
) s
left join {schema}.processes p on p.id = s.claimed_by

-- name: show_discarded
select
    d.id, d.type, d.origin, d."group", 'discarded', d.attempt, d.priority,
    d.payload, d.headers, d.unique_key, d.enqueued_at, null::timestamptz, d.discarded_at,
    d.errors, null
from {schema}.discarded d where d.id = %(id)s

-- name: show_finished
-- The history may hold a job that was discarded and retried twice: its last end counts.
select
    h.id, h.type, h.origin, h."group", h.outcome, h.attempt, null::smallint,
    null::jsonb, null::jsonb, null, h.enqueued_at, null::timestamptz, h.finished_at,
    null::jsonb, null
from {schema}.history h where h.id = %(id)s
order by h.finished_at desc limit 1

-- name: find_origins
select distinct f.origin from {schema}.find_jobs(%(ids)s) f

-- name: make_jobs_origins
-- An origin that no process has ever owned gets its rows, so that they can be locked.
insert into {schema}.origins (role, origin)
select app.role, o.origin from unnest(%(origins)s::text[]) as o(origin)
cross join (select 'execute' as role union select role from {schema}.apps) app
on conflict do nothing

-- name: lock_jobs_origins
-- Claims and completions hold these rows `for share`. So this waits for those in flight,
-- and blocks new ones until it commits. It locks in the same order as take-overs. A claim
-- whose snapshot is from before the commit, and whose lock is from after it, notices the
-- mark, which is new each time. Earlier releases read it as a transaction id.
with locked as materialized (
    select o.role, o.origin from {schema}.origins o
    where o.role like 'execute%%' and o.origin = any (%(origins)s::text[])
    order by o.origin, o.role
    for no key update
)
update {schema}.origins o set changed_by = pg_current_xact_id()::text::bigint
from locked where o.role = locked.role and o.origin = locked.origin

-- name: cancel_jobs
-- This runs in a statement after the lock, so its snapshot sees every claim committed
-- before. Jobs that the origin's living owner has claimed may be running, and are asked
-- to stop. A dead owner's claims do not count.
with wanted as materialized (
    select j.origin, j.id
    from unnest(%(origins)s::text[]) as o(origin)
    cross join lateral (
        select j.origin, j.id from {schema}.jobs j
        where j.origin = o.origin and j.id = any (%(ids)s::bigint[]) offset 0
    ) j
),
running as materialized (
    select distinct w.origin, w.id from wanted w
    join {schema}.origins o on o.role like 'execute%%' and o.origin = w.origin
    join {schema}.processes p on p.id = o.owner
        and {alive}
    where exists (
        select from {schema}.claims c where c.owner = o.owner and w.id = any (c.ids)
    )
),
deleted as (
    delete from {schema}.jobs where ctid = any (array(
        select row.ctid from wanted w
        cross join lateral (
            select j.ctid from {schema}.jobs j
            where j.origin = w.origin and j.id = w.id offset 0
        ) row
        where not exists (select from running r where r.id = w.id)
    ))
    returning id, origin, type, "group", attempt + crashes as attempt, enqueued_at
),
-- A row that has moved at this moment, as in `remove`.
moved as (
    delete from {schema}.jobs j
    where j.origin = any (array(select distinct w.origin from wanted w))
        and j.id = any (array(
            select w.id from wanted w
            where not exists (select from running r where r.id = w.id)
                and (w.id in (select d.id from deleted d)) is not true
        ))
    returning id, origin, type, "group", attempt + crashes as attempt, enqueued_at
),
removed as (select * from deleted union all select * from moved),
noted as (
    insert into {schema}.history
        (keep_until, id, origin, type, "group", outcome, attempt, enqueued_at)
    select (clock_timestamp() at time zone 'UTC')::date + %(keep)s::int,
        id, origin, type, "group", 'cancelled', attempt, enqueued_at
    from removed where %(keep)s::int > 0
),
freed as materialized (
    -- If the head of a group is gone, the next job lies behind its owner's cursor. As a
    -- job that is due now it is found at once, like a retried one. A job that a living
    -- owner has claimed goes on by itself, and must not be changed while it runs.
    select head.at
    from (
        select origin, "group", min(id) as id from removed
        where "group" is not null group by origin, "group"
    ) gone
    cross join lateral (
        select j.ctid as at, j.id, j.state from {schema}.jobs j
        -- Written as a range, as in `claim`.
        where j.origin = gone.origin
            and (j."group", j.id) > (gone."group", 0) and j."group" <= gone."group"
            and not exists (select from removed r where r.id = j.id)
        order by j."group", j.id limit 1
    ) head
    where head.id > gone.id and head.state = 'available'
        and not exists (
            select from {schema}.origins o
            join {schema}.claims c on c.owner = o.owner
            join {schema}.processes p on p.id = c.owner
            where o.role like 'execute%%' and o.origin = gone.origin
                and head.id = any (c.ids)
                and {alive}
        )
),
woken as (
    update {schema}.jobs set state = 'scheduled', run_at = clock_timestamp()
    where ctid = any (array(select at from freed))
),
asked as (
    insert into {schema}.cancellations (id, origin)
    select id, origin from running
    on conflict (id) do nothing
)
select id, 'cancelled' from removed
union all
select id, 'requested' from running

-- name: pause
insert into {schema}.pauses (kind, name) values (%(kind)s, %(name)s)
on conflict do nothing

-- name: resume
delete from {schema}.pauses where kind = %(kind)s and name = %(name)s

-- name: list_pauses
select kind, name, paused_at from {schema}.pauses order by kind, name

-- name: is_known_name
-- Whether anything has this name now; a group is known while it has unfinished jobs.
select case %(kind)s
    when 'type' then exists (
        select from {schema}.processes p where %(name)s = any (p.types)
    )
    when 'origin' then exists (
        select from {schema}.topics t
        where %(name)s = any (array(
            select t.topic || '/' || n from generate_series(0, t.partitions - 1) n
        ))
    )
    else exists (
        select from {schema}.job_origins() as o(origin)
        cross join lateral (
            select from {schema}.jobs j
            where j.origin = o.origin and j."group" = %(name)s
            order by j.id limit 1
        ) j
    )
end

-- part: chosen_discarded
-- The next discarded jobs that a command asks for, by their ids or by a filter. Errors
-- are compared literally.
from {schema}.discarded d
where d.id > %(after)s
    and (%(ids)s::bigint[] is null or d.id = any (%(ids)s))
    and (%(type)s::text is null or d.type = %(type)s)
    and (%(group)s::text is null or d."group" = %(group)s)
    and (%(origin)s::text is null or d.origin = %(origin)s)
    and (%(since)s::timestamptz is null or d.discarded_at >= %(since)s)
    -- A job that fails again meanwhile is not chosen a second time.
    and d.discarded_at <= %(until)s
    and (
        %(error)s::text is null
        or strpos(lower(d.errors -> -1 ->> 'error'), lower(%(error)s)) > 0
    )
order by d.id limit %(limit)s
for update skip locked

-- name: retry_discarded
-- Move a job back under the same id, so with the same idempotency key, and first in its
-- group. Its id lies behind every cursor: as a job that is due now it is found at once,
-- whereas an available one would wait for the sweep. A job stays discarded if another
-- unfinished job has its unique key. This runs after `hold_home`, so that a move of the
-- home topic moves either the discarded jobs or the new ones.
with chosen as materialized (
    select d.* {chosen_discarded}
),
inserted as (
    insert into {schema}.jobs (
        origin, id, type, "group", state, priority, payload, run_at, headers,
        unique_key, enqueued_at, errors, source, record_offset
    )
    select
        c.origin, c.id, c.type, c."group", 'scheduled', c.priority, c.payload,
        clock_timestamp(), c.headers, c.unique_key, c.enqueued_at, c.errors,
        place.source, place.record_offset
    from chosen c
    -- A row with a place says that the jobs it enqueues get its places, of which it has
    -- kept all. The last one is that of its own record, for which it may have to wait.
    left join lateral (
        select k.source, k.record_offset from {schema}.kept_places k
        where k.job_id = c.id order by k.source, k.record_offset desc limit 1
    ) place on true
    order by c.id
    on conflict (type, unique_key) where unique_key is not null do nothing
    returning id
),
gone as (
    delete from {schema}.discarded d using inserted i where d.id = i.id
),
-- The last word counts. The discard has not seen a request that was made meanwhile.
asked as (
    delete from {schema}.cancellations where id in (select id from inserted)
)
select c.id, i.id is not null from chosen c left join inserted i using (id) order by 1

-- name: list_origins
select o.origin from {schema}.job_origins() as o(origin) order by 1

-- part: may_be_retried
-- The job is not due yet and has failed, or its id was given. Errors are compared
-- literally.
j.state = 'scheduled' and j.run_at > %(until)s
    and (%(type)s::text is null or j.type = %(type)s)
    and (%(group)s::text is null or j."group" = %(group)s)
    and (%(origin)s::text is null or j.origin = %(origin)s)
    and case when j.errors is null then %(by_id)s::boolean
        else split_part(j.errors -> -1 ->> 'error', ': ', 1) <> all (%(put_off)s::text[])
    end
    and (
        %(error)s::text is null
        or strpos(lower(j.errors -> -1 ->> 'error'), lower(%(error)s)) > 0
    )
    and (
        %(since)s::timestamptz is null
        or (j.errors -> -1 ->> 'at')::timestamptz >= %(since)s
    )
    -- A job that fails again meanwhile is not retried a second time.
    and ((j.errors -> -1 ->> 'at')::timestamptz > %(until)s) is not true

-- name: retry_ids
-- Scheduled jobs become due now, and executors find them at once, like jobs that come
-- back from the discarded ones. No origin is locked, so claims go on: no claim has a
-- scheduled row. A row that is just being promoted, moved or cancelled is left out, so
-- this neither waits nor deadlocks.
with chosen as materialized (
    select row.* from {schema}.find_jobs(%(ids)s::bigint[]) f
    cross join lateral (
        select j.id, j.ctid as at, j.run_at from {schema}.jobs j
        where j.origin = f.origin and j.id = f.id and {may_be_retried}
        offset 0 for no key update skip locked
    ) row
),
-- Whoever names a job wants it to run, even if its last attempt was asked to stop.
asked as (
    delete from {schema}.cancellations where id in (select id from chosen)
)
update {schema}.jobs j set run_at = clock_timestamp()
from chosen where j.ctid = chosen.at
returning j.id, chosen.run_at

-- name: retry_scheduled
-- The same by a filter, in one origin, along the index of due times: each batch begins
-- where the last one ended. A job that has become due since the retry began is left out:
-- its new due time would lie behind this batch, and the next one would take it again.
with chosen as materialized (
    select j.ctid as at, j.run_at from {schema}.jobs j
    where j.origin = %(of)s and j.run_at >= %(due_from)s and {may_be_retried}
        and j.run_at > statement_timestamp()
    order by j.run_at limit %(limit)s
    for no key update skip locked
)
update {schema}.jobs j set run_at = clock_timestamp()
from chosen where j.ctid = chosen.at
returning j.id, chosen.run_at

-- name: delete_discarded
delete from {schema}.discarded where id = any (array(
    select d.id {chosen_discarded}
))
returning id, true

-- name: database_time
select clock_timestamp()

-- name: list_owners
-- List owners, and the work in each origin. Counts stop at `limit`, and follow the index:
-- an operator may watch this while millions wait.
select o.role, o.origin, p.pod, o.owner, o.epoch, o.since, p.heartbeat_at,
    coalesce(jobs.waiting, rows.waiting), jobs.claimed, offsets.next_offset,
    failing.failed_offset, failing.failing_since, failing.failure
from {schema}.origins o
left join {schema}.processes p on p.id = o.owner
left join lateral (
    select
        (
            select count(*) from (
                select from {schema}.jobs j where j.origin = o.origin limit %(limit)s
            ) few
        ) as waiting,
        (
            select count(*) from (
                select distinct running.id
                from {schema}.claims c cross join unnest(c.ids) as running(id)
                where c.owner = o.owner
            ) one
            cross join lateral (
                select from {schema}.jobs j
                where j.origin = o.origin and j.id = one.id offset 0
            ) row
        ) as claimed
) jobs on o.role like 'execute%%'
left join lateral (
    select count(*) as waiting from (
        select from {schema}.outbox b
        -- Also evaluated for other roles, whose numbers may be larger than any shard's.
        where b.shard = case when o.role = 'relay'
            then split_part(o.origin, '/', 2)::smallint
        end limit %(limit)s
    ) few
) rows on o.role = 'relay'
left join {schema}.offsets offsets
    on o.role = 'consume:' || offsets.consumer_group
    and o.origin = offsets.topic || '/' || offsets.partition
left join lateral (
    select offsets.failed_offset, offsets.failing_since, offsets.failure
    where {stands_still}
) failing on true
order by o.role, regexp_replace(o.origin, '/[0-9]+$', ''),
    substring(o.origin from '/([0-9]+)$')::int
