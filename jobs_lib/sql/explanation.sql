-- Why a job does not run. Each statement answers one question about one job.

-- name: explain_job
-- Read the job, its claim, and its origin's owner; nothing if it has ended.
select
    j.id, j.origin, j.type, j."group", j.state, j.attempt, j.run_at,
    extract(epoch from j.run_at - clock_timestamp())::float8,
    j.errors -> -1 ->> 'error',
    c.claimed_at, k.requested_at,
    o.owner, o.epoch, p.pod,
    extract(epoch from clock_timestamp() - p.heartbeat_at)::float8, p.types,
    p.heartbeat_at, (
        select jsonb_agg(item) from jsonb_array_elements(p.busy) item
        where item -> 'types' ? j.type
    )
from {schema}.find_jobs(array[%(id)s]) f
join lateral (
    select j.id, j.origin, j.type, j."group", j.state, j.attempt, j.run_at, j.errors
    from {schema}.jobs j where j.origin = f.origin and j.id = f.id offset 0
) j on true
-- If several apps own the origin, take the owner that knows the type, if there is one.
left join lateral (
    select o.owner, o.epoch from {schema}.origins o
    left join {schema}.processes p on p.id = o.owner
    where o.role like 'execute%%' and o.origin = j.origin
    order by p.types is not null and j.type = any (p.types) desc, p.id is null, o.role
    limit 1
) o on true
left join {schema}.processes p on p.id = o.owner
left join {schema}.cancellations k on k.id = j.id
left join lateral (
    -- Only the owner's claims: those of earlier owners do not count any more.
    select c.claimed_at from {schema}.claims c
    where c.owner = o.owner and j.id = any (c.ids) and j.state = 'available'
    order by c.seq desc limit 1
) c on true

-- name: explain_pauses
select kind, name, paused_at from {schema}.pauses
where (kind = 'type' and name = %(type)s)
    or (kind = 'origin' and name = %(origin)s)
    or (kind = 'group' and name = %(group)s)
order by kind

-- name: explain_head
-- Read the first unfinished job of the group, and count the jobs before this one, up to a
-- limit: the exact number of a million jobs is of no use.
select min(b.id), count(*) from (
    select j.id from {schema}.jobs j
    where j.origin = %(origin)s and j."group" = %(group)s and j.id < %(id)s
    order by j.id limit %(limit)s
) b

-- name: explain_ahead
select count(*) from (
    select from {schema}.jobs j
    where j.origin = %(origin)s and j.id < %(id)s
    order by j.id limit %(limit)s
) b

-- name: explain_type
-- Count the live processes that run jobs: all, and those that know the type. A process
-- that does not say its types may know it.
select
    count(*),
    count(*) filter (where p.types is null or %(type)s = any (p.types)),
    coalesce(array_agg(p.pod order by p.pod) filter (where %(type)s = any (p.types)), '{{}}')
from {schema}.processes p
where {runs_jobs} and {alive}

-- name: explain_limit
-- List the pods with running jobs of a limited type. A statement that named the payload
-- would be refused to a role that only reads, and most limits need none.
select array_agg(coalesce(p.pod, s.owner::text) order by p.pod) from {schema}.slots s
left join {schema}.processes p on p.id = s.owner
where s.type = %(type)s

-- name: explain_limit_of
-- List the pods with running jobs that have the same value of the limit's parameter.
select array_agg(coalesce(p.pod, s.owner::text) order by p.pod) from {schema}.jobs j
join {schema}.slots s on s.type = %(type)s
    and s.value = {value_of_field}
left join {schema}.processes p on p.id = s.owner
where j.origin = %(origin)s and j.id = %(id)s

-- name: explain_record
-- The record for which it may have to wait; nothing if it comes from none.
select s.topic, s.partition, j.record_offset from {schema}.jobs j
join {schema}.sources s on s.id = j.source
where j.origin = %(origin)s and j.id = %(id)s

-- name: explain_ended
-- First from the discarded jobs, then the last end in the history.
select 'discarded', d.discarded_at, d.attempt, d.errors -> -1 ->> 'error'
from {schema}.discarded d where d.id = %(id)s
union all
(
    select h.outcome, h.finished_at, h.attempt, null from {schema}.history h
    where h.id = %(id)s order by h.finished_at desc limit 1
)

-- name: explain_places
-- The records that are not done before the job is, the earliest of each partition.
select s.consumer_group, s.topic, s.partition, min(p.record_offset)
from (
    select j.source, j.record_offset from {schema}.find_jobs(array[%(id)s]) f
    cross join lateral (
        -- `offset 0`: one index look-up each, whatever the statistics say.
        select j.source, j.record_offset from {schema}.jobs j
        where j.origin = f.origin and j.id = f.id offset 0
    ) j
    union all
    select k.source, k.record_offset from {schema}.kept_places k
    where k.job_id = %(id)s and (
        exists (select from {schema}.find_jobs(array[%(id)s]))
        or exists (select from {schema}.discarded d where d.id = %(id)s)
    )
) p
join {schema}.sources s on s.id = p.source
group by 1, 2, 3 order by 1, 2, 3

-- name: last_id
-- The highest id that was ever drawn.
select coalesce(pg_sequence_last_value(
    pg_get_serial_sequence(format('%%I.jobs', %(schema)s::text), 'id')::regclass
), 0)
