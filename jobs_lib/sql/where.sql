-- Where a change of one key is: in its table, the outbox, and with each consumer. An
-- operator may ask while millions of rows wait, so each look follows an index, and is
-- bounded.

-- name: follow_indexes
-- For this transaction only. A bitmap finds all rows of a shard before the first ones
-- are taken, and a table that seemed empty when it was analysed would be read whole.
select set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true)

-- name: find_capture
-- The trigger of `capture_changes`, with its arguments.
select t.tgargs, t.tgenabled <> 'D'
from pg_trigger t
where t.tgrelid = to_regclass(%(table)s) and t.tgname = 'jobs_lib_capture'

-- template: find_source_row
-- The key has one or several columns.
select t.{version} from {table} t where {is_it} limit 1

-- name: find_rows_of_key
-- The rows of a key that are not in Kafka yet, and who sends them.
select s.shard, live.found, live.oldest, live.version, before.found,
    batch.found, batch.oldest, batch.looked, coalesce(r.state = 'paused', false),
    held.found, held.id, held.oldest, held.version,
    hold.error, hold.since, hold.retry_at, hold.key is null,
    p.pod, p.heartbeat_at, coalesce({alive}, false), f.since
from (select {schema}.place_record(%(topic)s, %(key)s)) as s(shard)
cross join lateral (
    select count(*) as found, min(o.id) as id, min(o.created_at) as oldest,
        max(o.version) as version
    from (
        select o.id, o.created_at, o.version from {schema}.outbox o
        where o.topic = %(topic)s and o.key = %(key)s and o.class = 0 limit %(limit)s
    ) o
) live
cross join lateral (
    select count(*) as found from (
        select from {schema}.outbox o
        -- A range: with a constant class the planner might take the index of keys.
        where o.shard = s.shard and (o.class, o.id) >= (0, 0) and (o.class, o.id) < (0, live.id)
        order by o.class, o.id limit %(limit)s
    ) o
) before
cross join lateral (
    -- No index has the keys of re-exports: these are the next rows of each one that
    -- sends to the topic.
    select count(*) filter (where o.is_ours) as found, count(*) as looked,
        min(o.created_at) filter (where o.is_ours) as oldest,
        min(r.id) filter (where o.is_ours) as reexport_id
    from {schema}.reexports r
    cross join lateral (
        select o.created_at, o.topic = %(topic)s and o.key = %(key)s as is_ours
        from {schema}.outbox o
        where o.class = 1 and coalesce(o.reexport_id, 0) = r.id and o.shard = s.shard
        order by coalesce(o.reexport_id, 0), o.shard, o.id limit %(limit)s
    ) o
    where r.topic = %(topic)s and r.state in ('loading', 'running', 'paused')
) batch
cross join lateral (
    select count(*) as found, min(o.id) as id, min(o.created_at) as oldest,
        max(o.version) as version
    from (
        select o.id, o.created_at, o.version from {schema}.held_rows o
        where o.topic = %(topic)s and o.key = %(key)s order by o.id limit %(limit)s
    ) o
) held
left join lateral (
    -- That of the key, or of the whole topic: by the expressions of the index.
    select h.error, h.since, h.retry_at, h.key from {schema}.holds h
    where h.topic = %(topic)s and coalesce(h.key, '') in (%(key)s, '')
        and coalesce(h.row_id, 0) = 0
    order by h.key nulls last limit 1
) hold on held.found > 0
left join {schema}.reexports r on r.id = batch.reexport_id
left join {schema}.origins f on f.role = 'relay' and f.origin = 'shard/' || s.shard
left join {schema}.processes p on p.id = f.owner

-- name: find_consumers
-- How far groups are in one partition, who reads it, and whether they have skipped the
-- record at this offset.
select g.consumer_group, offsets.next_offset,
    (offsets.topic_id <> %(topic_id)s::uuid) is true, failing.failed_offset,
    failing.failing_since, failing.failure, skipped.error, skipped.skipped_at,
    p.pod, p.heartbeat_at, coalesce({alive}, false), o.since
from unnest(%(groups)s::text[]) as g(consumer_group)
left join {schema}.offsets offsets on offsets.consumer_group = g.consumer_group
    and offsets.topic = %(topic)s and offsets.partition = %(partition)s::int
left join lateral (
    select offsets.failed_offset, offsets.failing_since, offsets.failure
    where {stands_still}
) failing on true
left join {schema}.skipped skipped on skipped.consumer_group = g.consumer_group
    and skipped.topic = %(topic)s and skipped.partition = %(partition)s::int
    and skipped.record_offset = %(offset)s::bigint
    -- Of an earlier topic of this name, its record is another one.
    and (skipped.topic_id = offsets.topic_id) is not false
left join {schema}.origins o on o.role = 'consume:' || g.consumer_group
    and o.origin = %(topic)s || '/' || %(partition)s::int
left join {schema}.processes p on p.id = o.owner

-- template: find_model_row
-- The row of a key, and what is known of the key beside it.
select t.there is not null, coalesce(t.version, k.version), k.is_gone, k.noted_at
from (values (1)) as one(n)
left join lateral (
    select true, t.version from {table} t where t.{key} = %(key)s::text::{key_type}
) as t(there, version) on true
left join {schema}.model_keys k on k.model = %(model)s and k.key = %(key)s::text

-- name: find_noted_key
select not k.is_gone, k.version, k.is_gone, k.noted_at
from {schema}.model_keys k where k.model = %(model)s and k.key = %(key)s::text
