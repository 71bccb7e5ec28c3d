-- Insert jobs in the caller's transaction. A group's ids rise in the order of commits.
-- These run on any driver: every parameter and every result is text, and is cast.

-- name: enqueue
-- The function takes the locks before it draws the id. It keeps its plans, so a call
-- needs no prepared statement of ours on the caller's connection. A delay counts from
-- this moment, not from the transaction's start, which may be long ago.
select cast({schema}.insert_job(
    cast(%(origin)s as text), cast(%(type)s as text), cast(%(group)s as text),
    cast(%(payload)s as jsonb), {run_at},
    cast(%(priority)s as smallint), cast(%(headers)s as jsonb),
    cast(%(unique_key)s as text), cast(%(ordered)s as boolean), cast(%(hint)s as text),
    cast(%(partitions)s as int), cast(%(place)s as text)
) as text)

-- name: hold_home
-- For a bulk call with groups: their origins stay the same until it commits.
select topic, cast(partitions as text) from {schema}.hold_home_topic()

-- name: known_topics
select topic, cast(partitions as text), cast(home as text) from {schema}.topics

-- name: lock_groups
-- For a bulk call with few groups: lock each group exclusively, then share their origins.
-- A place is [origin, group].
select cast({schema}.lock_all_in_order(
    array_agg(hashtextextended(place ->> 0, 7601)),
    array_agg(hashtextextended(place ->> 1, 7602))
) as text)
from jsonb_array_elements(cast(%(places)s as jsonb)) as p(place)

-- name: lock_origins_of_groups
-- For many groups: lock their origins exclusively. A lock for each of 100,000 groups
-- would exhaust the server's shared memory for locks.
select cast(count(pg_advisory_xact_lock(key)) as text), {coarse} from (
    select distinct hashtextextended(origin, 7601) as key
    from jsonb_array_elements_text(cast(%(origins)s as jsonb)) as o(origin) order by key
) origins

-- part: coarse
-- The transaction's later calls see that these locks are taken, and take no lock for a
-- group or key: another transaction may hold that one, and wait for these.
(select set_config('jobs_lib.lock_room', least(0, coalesce(
    nullif(current_setting('jobs_lib.lock_room', true), ''), '0')::int)::text, true))

-- name: hint
select cast(pg_notify({schema}.channel(), cast(%(hint)s as text)) as text)

-- part: run_at
coalesce(
    cast(%(run_at)s as timestamptz),
    clock_timestamp() + make_interval(secs => cast(%(delay)s as float8))
)

-- name: find_time
-- For a bulk call: its time by the database's clock, and whether it is due already. The
-- form is the same for every DateStyle and time zone of a session.
select
    cast(due <= clock_timestamp() as text),
    to_char(due at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
from (select {run_at} as due) as asked

-- name: copy_jobs
copy {schema}.jobs (origin, type, "group", state, payload, run_at, headers) from stdin

-- name: copy_rows
-- The lines are UTF-8, whatever the encoding of the caller's session is.
copy {schema}.jobs (origin, type, "group", payload, state, run_at, priority, headers)
from stdin (encoding 'UTF8')

-- name: copy_placed_rows
-- For calls of a handler whose consumer tells how far its jobs are done.
copy {schema}.jobs (
    origin, type, "group", payload, state, run_at, priority, headers, source, record_offset
) from stdin (encoding 'UTF8')

-- name: places_of
-- The places of jobs whose handler enqueues many: of each partition one.
select cast(source as text), cast(record_offset as text)
from {schema}.places_of(cast(%(place)s as text))

-- name: keep_places_of
-- Such jobs may have places in several partitions, and a row of a new job holds one. So
-- all jobs with the place of the new ones keep the others, too.
select cast(count({schema}.keep_place(j.id, j.origin, p.source, p.record_offset)) as text)
from {schema}.places_of(cast(%(place)s as text)) p
cross join {schema}.jobs j
where j.source = cast(%(source)s as int)
    and j.record_offset = cast(%(record_offset)s as bigint) and p.source <> j.source

-- name: insert_rows
-- For drivers without COPY. A row is [origin, group, payload]; rows are sorted before the
-- ids are drawn.
insert into {schema}.jobs
    (
        origin, type, "group", payload, state, run_at, priority, headers, source,
        record_offset
    )
select
    value ->> 0, cast(%(type)s as text), value ->> 1, value -> 2,
    cast(%(state)s as text), cast(%(run_at)s as timestamptz),
    cast(%(priority)s as smallint), cast(%(headers)s as jsonb),
    cast(%(source)s as int), cast(%(record_offset)s as bigint)
from jsonb_array_elements(cast(%(rows)s as jsonb)) with ordinality as r(value, place)
order by place

-- name: find_place_source
-- The partition that a place names: that of its record, or the first of a job's places,
-- which is the one that the new row gets.
select s.consumer_group, s.topic, cast(s.partition as text) from {schema}.sources s
where s.id = coalesce(cast(%(source)s as int), (
    select p.source from {schema}.places_of(cast(%(place)s as text)) p
    order by p.source limit 1
))
