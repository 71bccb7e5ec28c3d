-- The outbox: written in the caller's transaction, sent and deleted by the shard's owner.

-- name: write_outbox
-- The key's lock comes first and the id is drawn after it: the ids of a key then rise in
-- the order in which their transactions commit, which is the order of sending. Through
-- any driver: parameters and result are text, the value is bytes, and all are cast.
with locked as materialized (
    select pg_advisory_xact_lock(
        hashtextextended(cast(%(topic)s as text) || chr(1) || cast(%(key)s as text), 7603)
    )
)
insert into {schema}.outbox (shard, topic, key, value, version, headers)
select
    cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(key)s as text),
    cast(%(value)s as bytea), cast(%(version)s as bigint), cast(%(headers)s as jsonb)
from locked
returning cast(id as text)

-- name: write_outbox_keyless
insert into {schema}.outbox (shard, topic, key, value, version, headers)
values (
    cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(key)s as text),
    cast(%(value)s as bytea), cast(%(version)s as bigint), cast(%(headers)s as jsonb)
)
returning cast(id as text)

-- name: known_shards
select cast(shards as text) from {schema}.installation

-- name: pending_shards
-- Which of the owned shards have rows: one look into the index for each; the order keeps
-- the planner on it.
select s.shard from unnest(%(shards)s::int[]) as s(shard)
cross join lateral (
    select from {schema}.outbox o
    where o.shard = s.shard order by o.class, o.id limit 1
) first

-- name: read_live
-- No cursor: a row that was committed late, with a lower id, is simply the next one. The
-- join makes it an empty block for a relay that has lost the shard.
select o.id, o.topic, o.key, o.value, o.headers, o.version, o.cause, o.entity, o.created_at
from {schema}.outbox o
where o.shard = %(shard)s and o.class = 0
    and exists (
        select from {schema}.origins f
        where f.role = 'relay' and f.origin = %(origin)s
            and f.owner = %(owner)s and f.epoch = %(epoch)s
    )
order by o.id limit %(limit)s

-- name: read_batch
-- Rows of re-exports: their state is read when they are sent. One whose key has a live
-- row waiting is dropped, because that row carries the newer state.
select o.id, o.topic, o.key, o.entity, o.reexport_id,
    exists (
        select from {schema}.outbox l
        where l.shard = o.shard and l.topic = o.topic and l.key = o.key and l.class = 0
    ) as superseded,
    r.state
from {schema}.outbox o
left join {schema}.reexports r on r.id = o.reexport_id
where o.shard = %(shard)s and o.class = 1
    and exists (
        select from {schema}.origins f
        where f.role = 'relay' and f.origin = %(origin)s
            and f.owner = %(owner)s and f.epoch = %(epoch)s
    )
order by o.id limit %(limit)s

-- name: take_records
select {schema}.take_records(%(reexport)s, %(wanted)s::int)

-- name: delete_block
-- Exactly the rows that Kafka has acknowledged, under the fence; what appeared meanwhile,
-- with whatever id, stays. Progress of re-exports is counted in the same transaction.
with own as materialized (
    select f.origin from {schema}.origins f
    where f.role = 'relay' and f.origin = %(origin)s
        and f.owner = %(owner)s and f.epoch = %(epoch)s
    for share of f
),
gone as (
    delete from {schema}.outbox where ctid = any (array(
        -- One index look-up a row, whatever the statistics say of an emptied table.
        select row.ctid
        from unnest(%(classes)s::int[], %(ids)s::bigint[]) as d(class, id)
        cross join lateral (
            select o.ctid from {schema}.outbox o
            where o.shard = %(shard)s and o.class = d.class and o.id = d.id offset 0
        ) row
        where exists (select from own)
    ))
    returning id, class, reexport_id
),
progress as (
    update {schema}.reexports r set
        sent = r.sent + n.sent, superseded = r.superseded + n.superseded
    from (
        select reexport_id, count(*) filter (where id <> all (%(dropped)s::bigint[])) as sent,
            count(*) filter (where id = any (%(dropped)s::bigint[])) as superseded
        from gone where reexport_id is not null group by reexport_id
    ) n
    where r.id = n.reexport_id
)
select count(*) from gone
