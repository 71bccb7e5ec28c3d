-- Read the topic of a read model again, beside the running service.

-- name: begin_resync
insert into {schema}.resyncs (model, topic, topic_id, consumer_group, begins, notes)
values (%(model)s, %(topic)s, %(topic_id)s, %(group)s, %(begins)s, 3)
on conflict (model) do nothing
returning model

-- name: read_resync
-- Where Kafka did not know the topic for a moment when it began, its id is the one with
-- which the partitions were taken.
select r.topic, coalesce(r.topic_id, (
        select f.topic_id from {schema}.offsets f
        where f.consumer_group = r.consumer_group and f.topic = r.topic
            and f.topic_id is not null
        order by f.partition limit 1
    )), r.consumer_group, r.begins, r.started_at
from {schema}.resyncs r
where r.model = %(model)s

-- name: lock_resync
-- Only while this one has not ended: the group tells it from one that began later.
select r.begins
from {schema}.resyncs r
where r.model = %(model)s and r.consumer_group = %(group)s
for update

-- name: note_resync_parts
insert into {schema}.resync_parts (model, partition, start_offset, end_offset)
select %(model)s, g.partition, g.start_offset, g.end_offset
from unnest(%(partitions)s::int[], %(starts)s::bigint[], %(ends)s::bigint[])
    as g(partition, start_offset, end_offset)

-- name: begin_resync_offsets
-- Without an offset a group begins with the oldest record.
insert into {schema}.offsets (consumer_group, topic, partition, next_offset, topic_id)
select %(group)s, %(topic)s, g.partition, g.next_offset, %(topic_id)s
from unnest(%(partitions)s::int[], %(starts)s::bigint[]) as g(partition, next_offset)
on conflict (consumer_group, topic, partition) do update set
    next_offset = excluded.next_offset, topic_id = excluded.topic_id,
    highest_offset = null, failed_offset = null, failure = null, failing_since = null

-- part: note_lists
-- A row for each key would take a little less time here, and twice as much at the end.
insert into {schema}.resync_noted (model, keys, versions, partitions, record_offsets)
select %(model)s, array_agg(n.key), array_agg(n.version), array_agg(n.partition),
    array_agg(n.record_offset)
from noted n
group by n.number / 5000

-- template: note_model_keys
-- Each key as the consumer writes it: of a UUID the digits alone.
with noted as (
    select t.key, t.version, k.partition, k.record_offset,
        row_number() over () as number
    from (
        select case when %(digits_alone)s then replace({key}::text, '-', '')
            else {key}::text end as key, version
        from {table}
    ) t
    left join {schema}.model_keys k on k.model = %(model)s and k.key = t.key
)
{note_lists}

-- name: note_side_keys
with noted as (
    select k.key, k.version, k.partition, k.record_offset,
        row_number() over () as number
    from {schema}.model_keys k
    where k.model = %(model)s and not k.is_gone
)
{note_lists}

-- name: note_shown
-- The lock keeps the end from looking at half of the blocks. Nothing is noted for one
-- that has ended.
with begun as (
    select r.model from {schema}.resyncs r where r.model = %(model)s for key share
)
insert into {schema}.resync_shown (model, keys)
select b.model, %(record_key)s::text[] from begun b

-- template: keep_shown
-- At the end only: a key comes that the topic did not show before. This must be a
-- statement of its own, which sees what the end has found while the lock was waited for.
-- The table's column may write a key otherwise than its record, such as 7 for 007.
delete from {schema}.resync_unshown
where model = %(model)s and key in (
    select k from unnest(%(record_key)s::text[]) k
    union all
    select k::{key_type}::text from unnest(%(record_key)s::text[]) k
)

-- name: read_resync_parts
-- How far each partition is.
select p.partition, p.start_offset, p.end_offset, f.next_offset
from {schema}.resync_parts p
join {schema}.resyncs r using (model)
left join {schema}.offsets f on f.consumer_group = r.consumer_group
    and f.topic = r.topic and f.partition = p.partition
where p.model = %(model)s and r.consumer_group = %(group)s
order by p.partition

-- template: find_unshown
-- All in one pass. Who comes later finds nothing noted any more. Keys are compared as the
-- table's column has them: it may write one otherwise than its record.
with noted as (
    delete from {schema}.resync_noted where model = %(model)s
    returning keys, versions, partitions, record_offsets
), shown as (
    delete from {schema}.resync_shown where model = %(model)s
    returning keys
), listed as materialized (
    -- Else the planner may look through all that was shown for each list anew.
    select n.key, n.version, n.partition, n.record_offset
    from noted, unnest(keys, versions, partitions, record_offsets)
        as n(key, version, partition, record_offset)
)
insert into {schema}.resync_unshown (model, key, version, partition, record_offset)
select %(model)s, n.key, n.version, n.partition, n.record_offset
from listed n
where not exists (
    select from (select unnest(keys)::{key_type} as key from shown) s
    where s.key = n.key::{key_type}
)

-- part: some_unshown
-- Some keys that the topic did not show; they are taken out of the list.
with unshown as (
    delete from {schema}.resync_unshown where ctid = any (array(
        select ctid from {schema}.resync_unshown where model = %(model)s
        limit %(rows)s for update skip locked
    ))
    returning key, version, partition, record_offset
)

-- part: has_not_changed
-- Whether nothing has been known of the key k since the re-synchronisation began.
not exists (
    select from {schema}.model_keys m
    where m.model = %(model)s and m.key = u.key
        and (m.partition, m.record_offset) is distinct from (u.partition, u.record_offset)
)

-- template: delete_unshown
{some_unshown}, gone as (
    delete from {table} t using unshown u
    where t.{key} = u.key::{key_type} and t.version is not distinct from u.version
        and {has_not_changed}
    returning t.{key}
)
select (select count(*) from unshown), (select count(*) from gone)

-- name: end_unshown
-- Where the versions are beside the tables. The rows of these keys go next.
{some_unshown}, gone as (
    update {schema}.model_keys m set is_gone = true, noted_at = clock_timestamp()
    from unshown u
    where m.model = %(model)s and m.key = u.key and not m.is_gone
        and (m.version, m.partition, m.record_offset) is not distinct from
            (u.version, u.partition, u.record_offset)
    returning m.key
)
select coalesce((select array_agg(key) from gone), '{{}}'), (select count(*) from unshown)

-- name: end_resync
with gone as (
    delete from {schema}.resyncs where model = %(model)s
), noted as (
    delete from {schema}.resync_noted where model = %(model)s
), shown as (
    delete from {schema}.resync_shown where model = %(model)s
)
delete from {schema}.resync_unshown where model = %(model)s

-- name: end_resync_group
-- Another process that lives may still have some partitions: it ends the rest. One that was
-- killed a moment ago seems to live. So whoever cancels waits for none.
with owned as materialized (
    select o.origin
    from {schema}.origins o join {schema}.processes p on p.id = o.owner
    where o.role = 'consume:' || %(group)s and {alive} and not %(is_cancelled)s
), offsets_gone as (
    delete from {schema}.offsets
    where consumer_group = %(group)s and topic = %(topic)s
        and topic || '/' || partition not in (select origin from owned)
), origins_gone as (
    delete from {schema}.origins
    where role = 'consume:' || %(group)s and origin not in (select origin from owned)
)
delete from {schema}.skipped
where consumer_group = %(group)s and topic = %(topic)s

-- name: find_resync_skipped
-- The first record that was skipped, and how many were.
select s.partition, s.record_offset, s.error, count(*) over ()
from {schema}.skipped s
where s.consumer_group = %(group)s and s.topic = %(topic)s
order by s.partition, s.record_offset
limit 1

-- name: read_model_parts
-- Each partition of a read model, and how far a re-synchronisation is in it.
select f.partition, f.next_offset, f.failed_offset, f.failure, (
        select count(*) from {schema}.skipped s
        where (s.consumer_group, s.topic, s.partition)
            = (f.consumer_group, f.topic, f.partition)
    ), p.end_offset, g.next_offset, g.failed_offset, g.failure
from {schema}.offsets f
left join {schema}.resyncs r on r.model = %(model)s and r.topic = f.topic
left join {schema}.resync_parts p on p.model = r.model and p.partition = f.partition
left join {schema}.offsets g on g.consumer_group = r.consumer_group
    and g.topic = f.topic and g.partition = f.partition
where f.consumer_group = %(group)s and f.topic = %(topic)s
order by f.partition
