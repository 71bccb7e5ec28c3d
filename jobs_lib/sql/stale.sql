-- Stale keys: what a compacted topic has and the table of its entity has not.

-- name: make_topic_keys
-- A table of this transaction alone: a list of all keys may be larger than memory.
create temporary table topic_keys (
    partition int not null, record_offset bigint not null, key text collate "C" not null,
    version bigint, tombstone boolean not null
) on commit drop

-- name: copy_topic_keys
copy topic_keys (partition, record_offset, key, version, tombstone) from stdin

-- name: analyze_topic_keys
-- Without statistics the planner would take the table for a small one.
analyze topic_keys

-- name: source_stale
-- Within a partition the last record of a key is the newest. A key that is in several
-- partitions, since the topic has grown, is where its version is the highest. The text of
-- the table's key is compared: a key of the topic may have no value of the key's type. Its
-- column may have a collation of its own.
--
-- Most keys are in the table, and nobody asks for the newest of their records.
with strange as materialized (
    select t.* from topic_keys t
    where not exists (
        select from (select {{text}} as key from {{table}}) s
        where s.key collate "C" = t.key
    )
),
last as (
    select distinct on (t.key, t.partition)
        t.key, t.record_offset, t.version, t.tombstone,
        max(t.version) over (partition by t.key) as highest
    from strange t order by t.key, t.partition, t.record_offset desc
),
newest as (
    select distinct on (l.key) l.key, l.tombstone, l.highest
    from last l order by l.key, coalesce(l.version, -1) desc, l.record_offset desc
)
select n.key, n.highest from newest n
where not n.tombstone

-- name: start_stale
-- It begins before the topic is read: what leaves live from here on is noted. If two start
-- at once, the unique index lets one in.
insert into {schema}.reexports (entity, topic, rate, stale)
values (%(entity)s, %(topic)s, %(rate)s, true)
on conflict (entity) where state in ('loading', 'running', 'paused') do nothing
returning id, started_at

-- name: look_at_stale
-- Whether it is open, and whether its keys are loaded. One that was given up may go on for
-- the changes of transactions, and is one of stale keys no more. The time of start
-- distinguishes it from one with the same id after a server has lost its last commits.
select x.stale and x.state in ('loading', 'running', 'paused'), exists (
    select from {schema}.reexport_ranges r where r.reexport_id = x.id
)
from {schema}.reexports x
where x.id = %(reexport)s and x.started_at = %(started_at)s

-- name: give_up_stale
-- After a comparison that failed: it has no keys, and ends. It is not deleted, since
-- transactions may have given it changes, which are still sent.
update {schema}.reexports x set stale = false
where x.id = %(reexport)s and x.started_at = %(started_at)s
    and x.state in ('loading', 'running', 'paused') and not exists (
    select from {schema}.reexport_ranges r where r.reexport_id = x.id
)

-- name: add_loaded_range
insert into {schema}.reexport_ranges (reexport_id, range, keys, loaded_at)
values (%(reexport)s, 0, %(keys)s, clock_timestamp())

-- name: waiting_keys
-- The keys of a topic whose live rows have not left.
select o.key from {schema}.outbox o
where o.topic = %(topic)s and o.class = 0 and o.key is not null
union all
select r.key from {schema}.held_rows r
where r.topic = %(topic)s and r.class = 0 and r.key is not null
