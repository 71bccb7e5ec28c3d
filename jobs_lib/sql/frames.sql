-- Re-exports of DataFrames: their states are staged, and sent from there.
--
-- A state never follows a newer one of its key. What the topic had is left out when a
-- range is loaded. What leaves live since then is noted: after Kafka has it, and before
-- its row is deleted. So a snapshot of the outbox has the live row, or its version. The
-- same holds for the tombstones of stale keys and of changes.

-- part: must_note
-- Whether something must be written before rows are deleted: the versions that have left,
-- or rows for the copy of a topic. It is asked by the statement that deletes. A re-export
-- of a DataFrame, or of stale keys, that this one does not see takes the topic's ends
-- later, and so finds the records in the topic; one that fills a copy reads the states
-- later; and rows that a transaction gives later have later versions.
(not %(noted)s and (
    exists (select from {schema}.reexports x where {notes})
    or exists (select from {schema}.topic_copies)
))

-- part: notes
-- The open re-exports for which it is noted what leaves live: those that carry a state or
-- a version of their own. The states are the condition of an index, which has few rows.
x.state in ('loading', 'running', 'paused') and (
    x.source = 'frame' or x.stale or x.added > 0
    or exists (select from {schema}.reexport_additions a where a.reexport_id = x.id)
)

-- part: overtaken
-- Whether the row `o` of the re-export `x` comes too late: what has left live since it
-- began says what is of the key. A stale key has records of its own again. A change has
-- the version of its tombstone; a record without a version does not say which is newer.
case when o.reexport_id is not null and (x.stale or o.cause <> 'reexport') then exists (
    select from {schema}.reexport_versions v
    where v.reexport_id = o.reexport_id and v.key = o.key and (
        o.cause = 'reexport'
        or (o.version <= v.version and v.version < 9223372036854775807)
    )
    offset 0
) else false end

-- name: read_source
select x.source from {schema}.reexports x where x.id = %(reexport)s

-- name: start_frame
-- If two start at once, the unique index lets one in, and the other gets no row.
insert into {schema}.reexports (entity, topic, rate, source)
values (%(entity)s, %(topic)s, %(rate)s, 'frame')
on conflict (entity) where state in ('loading', 'running', 'paused') do nothing
returning id, started_at

-- name: make_states
select {schema}.make_reexport_states(%(reexport)s)

-- name: read_ranges
-- Read the bounds of ranges that are not loaded.
select range, lower, upper from {schema}.reexport_ranges
where reexport_id = %(reexport)s and range = any (%(ranges)s::int[]) and loaded_at is null
order by range

-- name: copy_states
copy {schema}.reexport_states (reexport_id, key, version, value, content_type)
from stdin (format binary)

-- name: count_staged_range
-- States that the topic has already, or newer ones, are done.
update {schema}.reexports x set
    total = x.total + %(keys)s,
    superseded = x.superseded + %(left_out)s,
    state = case when x.state = 'loading' then {going_on} else x.state end
where x.id = %(reexport)s

-- name: read_states
-- Read the states of a block, and what has left live of their keys: two look-ups each.
select p.place::int, s.version, s.value, s.content_type, v.version
from unnest(%(reexports)s::bigint[], %(keys)s::text[])
    with ordinality as p(reexport_id, key, place)
left join lateral (
    select s.version, s.value, s.content_type from {schema}.reexport_states s
    where s.reexport_id = p.reexport_id and s.key = p.key offset 0
) s on true
left join lateral (
    select v.version from {schema}.reexport_versions v
    where v.reexport_id = p.reexport_id and v.key = p.key offset 0
) v on true

-- name: note_versions
-- Note what has left, for each re-export to the same topic that asks for it, but not for
-- the one that has sent it. One that fills a copy may have changes of the topic that
-- feeds it. The order keeps two relays from a deadlock.
insert into {schema}.reexport_versions as v (reexport_id, key, version)
select x.id, n.key, max(n.version)
from unnest(
    %(topics)s::text[], %(keys)s::text[], %(versions)s::bigint[], %(reexports)s::bigint[]
) as n(topic, key, version, reexport_id)
join {schema}.reexports x on x.id <> n.reexport_id and {notes} and (
    x.topic = n.topic or exists (
        select from {schema}.topic_copies c where c.copy = x.topic and c.topic = n.topic
    )
)
group by x.id, n.key
order by x.id, n.key
on conflict (reexport_id, key) do update set version = excluded.version
    where v.version < excluded.version

-- name: list_ended_states
-- List the partitions of re-exports that have ended, or are no longer there.
select substr(c.relname, 17)::bigint
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
join pg_class p on p.oid = i.inhparent and p.relname = 'reexport_states'
join pg_namespace n on n.oid = p.relnamespace and n.nspname = %(schema)s
where c.relname ~ '^reexport_states_[0-9]+$' and not exists (
    select from {schema}.reexports x
    where x.id = substr(c.relname, 17)::bigint
        and x.state in ('loading', 'running', 'paused')
)
order by 1

-- name: empty_states
select {schema}.empty_reexport_states(%(reexport)s)

-- name: drop_states
select {schema}.drop_reexport_states(%(reexport)s)

-- name: forget_versions
-- Delete some of what was noted for re-exports that have ended. A new one has an id of
-- its own, so none of its notes is deleted.
with gone as (
    delete from {schema}.reexport_versions where ctid = any (array(
        select v.ctid from {schema}.reexport_versions v
        where not exists (
            select from {schema}.reexports x
            where x.id = v.reexport_id and x.state in ('loading', 'running', 'paused')
        )
        limit %(rows)s
    ))
    returning 1
)
select count(*) from gone
