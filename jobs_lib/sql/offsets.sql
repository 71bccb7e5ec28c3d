-- The offsets of each consumer group, in the same database as its effects.

-- name: make_offsets
insert into {schema}.offsets (consumer_group, topic, partition)
select %(group)s, t.topic, t.partition
from unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
on conflict do nothing

-- name: read_offsets
select o.topic, o.partition, o.next_offset
from {schema}.offsets o
join unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
    using (topic, partition)
where o.consumer_group = %(group)s

-- name: read_highest
select o.topic, o.partition, o.highest_offset
from {schema}.offsets o
join unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
    using (topic, partition)
where o.consumer_group = %(group)s

-- name: read_passed
-- Before which offset a group has read a partition. What lies below the highest one comes
-- again, unless it is the highest one of a topic before.
select coalesce(
    case when o.topic_id is null then o.next_offset
    else greatest(o.next_offset, o.highest_offset) end, 0
)
from {schema}.offsets o
where o.consumer_group = %(group)s and o.topic = %(topic)s
    and o.partition = %(partition)s::int
    and (o.topic_id is null or o.topic_id = coalesce(%(topic_id)s::uuid, o.topic_id))

-- name: find_replaced
-- The partitions whose topic is another one than that of their offset. Ids that are not
-- known yet are filled in. Where an operator has taken the id away, what the topic before
-- had counts no more: only `next_offset` holds.
with given as (
    select * from unnest(
        %(topics)s::text[], %(partitions)s::int[], %(topic_ids)s::uuid[]
    ) as t(topic, partition, topic_id)
), filled as (
    update {schema}.offsets o
    set topic_id = g.topic_id, highest_offset = o.next_offset
    from given g
    where o.consumer_group = %(group)s
        and (o.topic, o.partition) = (g.topic, g.partition)
        and (o.topic_id is null or o.next_offset is null)
        and o.topic_id is distinct from g.topic_id
)
select o.topic, o.partition
from {schema}.offsets o join given g using (topic, partition)
where o.consumer_group = %(group)s and o.topic_id <> g.topic_id
    and o.next_offset is not null

-- name: find_ended
-- The partitions that stand still because they ended before their offset. What has been
-- appended since is not what lay there.
select o.topic, o.partition
from {schema}.offsets o
join unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
    using (topic, partition)
where o.consumer_group = %(group)s and o.failed_offset = o.next_offset
    and starts_with(o.failure, %(ended)s)

-- name: replace_topic
-- Without the offset, which `advance_offset` would take for one of the new topic. The marks
-- of effects are offsets of the topic before, too: the current version tells of all that
-- the new topic has.
update {schema}.offsets
set topic_id = %(topic_id)s, highest_offset = null, next_offset = null,
    effects_from = null, effects_until = null
where consumer_group = %(group)s and topic = %(topic)s
    and partition = %(partition)s::int and next_offset = %(before)s

-- name: begin_block
-- A rollback undoes this setting, so that `advance_offset` notices it.
select set_config('jobs_lib.block', %(block)s, true)

-- name: begin_placed_block
-- Jobs that are enqueued in SQL get the place of the transaction.
select set_config('jobs_lib.block', %(block)s, true),
    set_config('jobs_lib.place', %(place)s, true)

-- name: place_record
select set_config('jobs_lib.place', %(place)s, true)

-- name: advance_offset
-- Where no handler runs that could end the transaction, there is no mark of it.
select {schema}.advance_offset(
    %(group)s, %(topic)s, %(partition)s::int, %(owner)s, %(epoch)s, %(expected)s,
    %(next_offset)s, %(appended_at)s,
    coalesce(%(block)s, current_setting('jobs_lib.block', true))
), current_setting('jobs_lib.place_used', true) = 'yes'

-- name: advance_resync
-- As `advance_offset`, for the group of a re-synchronisation: once that has ended, nobody
-- owns the partition. A process that has not noticed the end would write a table by the
-- name that it had before. The lock lets the end wait for this commit.
with begun as materialized (
    select from {schema}.resyncs r where r.consumer_group = %(group)s for key share
)
select {schema}.advance_offset(
    %(group)s, %(topic)s, %(partition)s::int,
    case when exists (select from begun) then %(owner)s::uuid end, %(epoch)s,
    %(expected)s, %(next_offset)s, %(appended_at)s,
    coalesce(%(block)s, current_setting('jobs_lib.block', true))
), false

-- name: refuse_block
-- It always fails. So the end of a pipeline rolls back what was sent, where it would commit
-- a block that the client has not sent whole.
select 'the block was not sent whole'::int

-- name: skip_record
-- In the transaction that moves the offset past the record. Its place may hold a record
-- that was skipped before: of an earlier topic of this name, or when the offset was last
-- there.
insert into {schema}.skipped as s (
    consumer_group, topic, partition, record_offset, topic_id, error
)
select f.consumer_group, f.topic, f.partition, %(offset)s, f.topic_id, %(error)s
from {schema}.offsets f
where f.consumer_group = %(group)s and f.topic = %(topic)s
    and f.partition = %(partition)s::int
on conflict (consumer_group, topic, partition, record_offset) do update set
    topic_id = excluded.topic_id, error = excluded.error,
    skipped_at = excluded.skipped_at

-- part: skipped_between
s.consumer_group = %(group)s and s.topic = %(topic)s and s.partition = %(partition)s::int
    and s.record_offset >= %(first)s and s.record_offset < %(following)s

-- name: read_skipped
select s.record_offset
from {schema}.skipped s
join {schema}.offsets f using (consumer_group, topic, partition)
where {skipped_between}
    and (s.topic_id is null or f.topic_id is null or s.topic_id = f.topic_id)

-- name: forget_skipped
-- They come again, and are applied in this transaction. Places of an earlier topic of this
-- name stay: their records do not come again.
delete from {schema}.skipped s
using {schema}.offsets f
where {skipped_between}
    and (f.consumer_group, f.topic, f.partition)
        = (s.consumer_group, s.topic, s.partition)
    and (s.topic_id is null or f.topic_id is null or s.topic_id = f.topic_id)

-- part: ours
-- A process that was fenced must not write over what the new owner has found. The lock
-- makes a take-over wait for this commit, as `advance_offset` does.
with ours as materialized (
    select from {schema}.origins o
    where o.role = 'consume:' || %(group)s
        and o.origin = %(topic)s || '/' || %(partition)s::int
        and o.owner = %(owner)s and o.epoch = %(epoch)s
    for share
)

-- name: owns_partition
{ours}
select exists (select from ours)

-- part: in_place
f.consumer_group = %(group)s and f.topic = %(topic)s
    and f.partition = %(partition)s::int
    and f.next_offset is not distinct from %(expected)s
    and exists (select from ours)

-- name: note_failure
-- `advance_offset` takes the note away. The same record has failed since its first note.
{ours}
update {schema}.offsets f set
    failing_since = case when f.failed_offset = %(offset)s and f.failing_since is not null
        then f.failing_since else clock_timestamp() end,
    failed_offset = %(offset)s, failure = %(error)s
where {in_place}

-- name: clear_failure
{ours}
update {schema}.offsets f set
    failed_offset = null, failure = null, failing_since = null
where {in_place} and f.failed_offset is not null

-- part: stands_still
-- Whether a partition stands still at the record that its row names. A record before the
-- offset is one that somebody has passed over.
offsets.failed_offset >= coalesce(offsets.next_offset, 0)

-- name: forget_gone_keys
-- No topic has records older than these any more: it has been compacted since.
with forgotten as (
    delete from {schema}.model_keys where ctid = any (array(
        select g.ctid from {schema}.model_keys g
        where g.is_gone and g.noted_at < clock_timestamp() - make_interval(days => %(days)s::int)
        limit %(rows)s
        for update skip locked
    ))
    returning key
)
select count(*) from forgotten

-- part: is_of_topic
-- Whether the topic still has the partition of the row o. One that was made anew with fewer
-- leaves the rows of the others, and every topic has the partition 0.
not exists (
    select from {schema}.offsets f
    where f.consumer_group = o.consumer_group and f.topic = o.topic
        and f.partition = 0 and f.topic_id <> o.topic_id
)
