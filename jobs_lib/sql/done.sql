-- How far the jobs of a group's records are done: told by the owner of each partition.

-- name: make_sources
-- Partitions get their numbers once. `on conflict` alone would draw one at each take-over.
insert into {schema}.sources (consumer_group, topic, partition)
select %(group)s, t.topic, t.partition
from unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
where not exists (
    select from {schema}.sources s
    where (s.consumer_group, s.topic, s.partition) = (%(group)s, t.topic, t.partition)
)
on conflict do nothing

-- name: read_sources
select s.topic, s.partition, s.id from {schema}.sources s
join unnest(%(topics)s::text[], %(partitions)s::int[]) as t(topic, partition)
    using (topic, partition)
where s.consumer_group = %(group)s

-- name: has_places_index
-- One that is invalid was not made to its end.
select 1 from pg_index i
where i.indexrelid = to_regclass(format('%%I.jobs_of_place', %(schema)s::text)) and i.indisvalid

-- part: told
-- The partitions that are ours, as this statement's snapshot has them: values of a later
-- version would not fit the jobs that the snapshot shows.
ours as materialized (
    select o.origin from {schema}.origins o
    join unnest(%(origins)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch)
        using (origin)
    where o.role = 'consume:' || %(group)s and o.owner = %(owner)s
        and o.epoch = mine.epoch
    order by o.origin
    for share of o
),
told as materialized (
    select s.id as source, f.topic, f.partition, f.next_offset, f.done_offset,
        coalesce(f.done_offset, 0) as low, coalesce(f.done_id, 0) as low_id
    from {schema}.sources s
    join {schema}.offsets f using (consumer_group, topic, partition)
    where s.consumer_group = %(group)s and f.next_offset is not null
        and f.topic || '/' || f.partition in (select origin from ours)
)

-- name: sweep_places
-- Delete the lowest kept places whose jobs have ended, before the others are looked at.
with {told},
seen as materialized (
    select k.* from told t cross join lateral (
        select k.ctid as at, k.origin, k.job_id from {schema}.kept_places k
        where k.source = t.source and k.record_offset >= t.low
        order by k.record_offset limit %(rows)s
    ) k
)
delete from {schema}.kept_places where ctid = any (array(
    select s.at from seen s
    -- `offset 0`: one index look-up each, whatever the statistics say.
    where not exists (
        select from {schema}.jobs j where j.origin = s.origin and j.id = s.job_id offset 0
    ) and not exists (
        select from {schema}.discarded d where d.id = s.job_id offset 0
    )
))

-- name: forget_places
-- Delete kept places whose jobs have ended, in the order of their jobs, whichever
-- partition they are of: nobody sweeps those of which nobody tells how far they are done.
-- Returns the job behind which the next look begins; null if there is none left.
with seen as materialized (
    select k.ctid as at, k.origin, k.job_id from {schema}.kept_places k
    where k.job_id > %(after)s order by k.job_id limit %(rows)s
),
gone as (
    delete from {schema}.kept_places where ctid = any (array(
        select k.ctid from {schema}.kept_places k
        where k.ctid = any (array(
            select s.at from seen s
            -- `offset 0`: one index look-up each, whatever the statistics say.
            where not exists (
                select from {schema}.jobs j
                where j.origin = s.origin and j.id = s.job_id offset 0
            ) and not exists (
                select from {schema}.discarded d where d.id = s.job_id offset 0
            )
        ))
        for update skip locked
    ))
    returning job_id
)
-- Of the last one there may be more than were looked at.
select max(s.job_id) - (
    count(*) = %(rows)s and max(s.job_id) in (select job_id from gone)
)::int
from seen s

-- name: find_done
-- The lowest place with an unfinished job, else the stored offset, and remember it: the
-- next look begins there, so it never walks over what was done before. Nothing can appear
-- below: see docs/decisions/0030-done-by-a-low-mark.md. It is null of partitions that are
-- ours and have no offset.
with {told},
found as materialized (
    select t.*, least(j.record_offset, k.record_offset, t.next_offset) as done,
        -- Jobs of that record may still come, unless it is handled and only the rows of
        -- its jobs have the place.
        case when j.record_offset < least(k.record_offset, t.next_offset) then j.id end
            as done_id
    from told t
    left join lateral (
        select j.record_offset, j.id from {schema}.jobs j
        where j.source = t.source and (j.record_offset, j.id) >= (t.low, t.low_id)
        order by j.record_offset, j.id limit 1
    ) j on true
    left join lateral (
        select k.record_offset from {schema}.kept_places k
        where k.source = t.source and k.record_offset >= t.low
        order by k.record_offset limit 1
    ) k on true
),
free as materialized (
    -- This must not wait for whoever sets several offsets, who may wait for it.
    select f.topic, f.partition from {schema}.offsets f
    join found using (topic, partition)
    where f.consumer_group = %(group)s
    for no key update of f skip locked
),
moved as (
    update {schema}.offsets f set done_offset = n.done, done_id = n.done_id
    from found n join free using (topic, partition)
    where f.consumer_group = %(group)s
        and (f.topic, f.partition) = (n.topic, n.partition)
        -- The offset may have been set back meanwhile, and this with it.
        and f.done_offset is not distinct from n.done_offset
        and (f.done_offset, f.done_id) is distinct from (n.done, n.done_id)
)
select topic, partition, done, done = next_offset from found
union all
select split_part(origin, '/', 1), split_part(origin, '/', 2)::int, null, null from ours
where origin not in (select topic || '/' || partition from told)

-- name: find_outbox_ends
-- The highest id of each shard whose rows wait, or are held; and always the server. The
-- order keeps the planner on the primary key, from above, and a range in place of a
-- constant class keeps it off the index of keys. Held rows are read once for all shards.
with held as materialized (
    select h.shard, max(h.id) as id from {schema}.held_rows h
    where h.class = 0 group by h.shard
)
select s.shard, greatest(o.id, h.id), {server}
from {schema}.installation i
cross join lateral generate_series(0, i.shards - 1) as s(shard)
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard and (o.class, o.id) < (1, 0)
    order by o.class desc, o.id desc limit 1
) o on true
left join held h on h.shard = s.shard
where coalesce(o.id, h.id) is not null
union all
select null, null, {server}
order by 1 nulls first

-- name: find_unsent
-- Of each shard the first row up to an end that waits or is held, if there is one. A row
-- below the last one found has been sent, or belongs to a transaction that came later, so
-- the look begins there.
with asked as materialized (
    select s.shard, s.low, s.high
    from unnest(%(shards)s::int[], %(starts)s::bigint[], %(ends)s::bigint[])
        as s(shard, low, high)
),
held as materialized (
    select s.shard, min(h.id) as id from asked s
    join (
        -- `offset 0`: held rows are read once, and not once for each shard.
        select h.shard, h.id from {schema}.held_rows h where h.class = 0 offset 0
    ) h on h.shard = s.shard and h.id between s.low and s.high
    group by s.shard
)
select s.shard, least(o.id, h.id)
from asked s
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard
        and (o.class, o.id) >= (0, s.low) and (o.class, o.id) <= (0, s.high)
    order by o.class, o.id limit 1
) o on true
left join held h on h.shard = s.shard
where coalesce(o.id, h.id) is not null
