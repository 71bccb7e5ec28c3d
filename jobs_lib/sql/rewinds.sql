-- Set consumers back: to read again what they have read.

-- name: lock_consumed
-- The owner commits under a share lock of this row. So this waits for a block that is
-- being committed, and no other begins to commit before the new offset is there.
select o.origin
from {schema}.origins o
where o.role = 'consume:' || %(group)s and o.origin in (
    select f.topic || '/' || f.partition from {schema}.offsets f
    where f.consumer_group = %(group)s and f.topic = %(topic)s
)
order by o.origin
for update

-- name: read_consumed
-- The partitions of a topic that the group has read, and where each goes on.
select f.partition, f.next_offset
from {schema}.offsets f
where f.consumer_group = %(group)s and f.topic = %(topic)s
order by f.partition
for update

-- name: read_places
-- The same without locks, and also of those of which nothing was applied.
select f.partition, f.next_offset
from {schema}.offsets f
where f.consumer_group = %(group)s and f.topic = %(topic)s

-- name: rewind_offsets
update {schema}.offsets f set
    next_offset = g.next_offset, updated_at = clock_timestamp(),
    failed_offset = null, failure = null, failing_since = null
from unnest(%(partitions)s::int[], %(offsets)s::bigint[]) as g(partition, next_offset)
where f.consumer_group = %(group)s and f.topic = %(topic)s
    and f.partition = g.partition

-- name: release_consumed
-- What the owner has in memory counts no more: it takes the partition again, and seeks.
update {schema}.origins set
    owner = null, epoch = epoch + 1, since = clock_timestamp()
where role = 'consume:' || %(group)s and origin = any (%(origins)s)

-- name: has_skipped
-- Whether the group has skipped a record of the topic: if not, Kafka need not be asked.
select exists (
    select from {schema}.skipped s
    where s.consumer_group = %(group)s and s.topic = %(topic)s
)

-- name: find_skipped
-- By partition, the first record that was skipped, and how many lie before its start.
-- Places of an earlier topic of this name are left out: their records are gone.
select s.partition, min(s.record_offset),
    count(*) filter (where s.record_offset < g.start_offset)
from {schema}.skipped s
join {schema}.offsets f using (consumer_group, topic, partition)
left join unnest(%(partitions)s::int[], %(starts)s::bigint[])
    as g(partition, start_offset) using (partition)
where s.consumer_group = %(group)s and s.topic = %(topic)s
    and (s.topic_id is null or f.topic_id is null or s.topic_id = f.topic_id)
group by s.partition

-- name: count_skipped
-- The rows stay until the records are applied: none of them counts as repeated then. Places
-- of an earlier topic of this name are not read by a replay.
select s.partition, count(*)
from {schema}.skipped s
join unnest(%(partitions)s::int[], %(offsets)s::bigint[]) as g(partition, first)
    using (partition)
join {schema}.offsets f using (consumer_group, topic, partition)
where s.consumer_group = %(group)s and s.topic = %(topic)s and s.record_offset >= g.first
    and (s.topic_id is null or f.topic_id is null or s.topic_id = f.topic_id)
group by s.partition
