-- Copies of topics: while one is fed, each change of a topic's key is sent to it, too.

-- name: find_copies
select topic, copy, entity from {schema}.topic_copies

-- name: begin_copy
-- In the transaction that begins the re-export which fills it: one that is refused leaves
-- no copy. A copy has no copy, or two topics would feed each other for ever.
insert into {schema}.topic_copies as c (topic, copy, entity, began_at)
select %(topic)s, %(copy)s, %(entity)s, %(started_at)s
where not exists (
    select from {schema}.topic_copies o
    where o.topic = %(copy)s or o.copy = %(topic)s
)
on conflict (topic, copy) do update set entity = excluded.entity
returning c.topic

-- name: lock_copy
-- Who begins a re-export to it waits, and begins the copy anew if it is ended meanwhile.
select topic from {schema}.topic_copies where entity = %(entity)s and copy = %(copy)s
for update

-- name: has_rows_of_topic
-- Whether rows of a topic wait, or are held: their changes would not reach the copy. An
-- open re-export may have rows of changes, too, which no index finds.
select exists (
    select from {schema}.outbox o where o.topic = %(topic)s and o.class = 0
) or exists (select from {schema}.held_rows r where r.topic = %(topic)s)
or exists (
    select from {schema}.reexports x
    where x.topic = %(topic)s and x.state in ('loading', 'running', 'paused')
)

-- name: end_copy
delete from {schema}.topic_copies where entity = %(entity)s and copy = %(copy)s

-- name: find_copy_filling
-- The latest re-export that has filled it and began while it was fed. An earlier one lacks
-- what was sent in between. Ids tell the order also after a clock was set back; the times,
-- if the re-export that began the copy is gone.
select max(x.id) from {schema}.topic_copies c
join {schema}.reexports x on x.entity = c.entity and x.topic = c.copy
left join {schema}.reexports b on b.topic = c.copy and b.started_at = c.began_at
where c.entity = %(entity)s and c.copy = %(copy)s and {has_filled}
    and case when b.id is null then x.started_at >= c.began_at else x.id >= b.id end

-- name: find_uncopied
-- The latest re-export that sent states to a topic after its copy was filled: a relay
-- copies none of them. It copies tombstones of stale keys, and changes of transactions.
select max(x.id) from {schema}.reexports x
where x.entity = %(entity)s and x.topic = %(topic)s and x.id > %(after)s
    and not x.stale and exists (
        select from {schema}.reexport_ranges r where r.reexport_id = x.id
    )

-- name: find_stale_reexports
-- Those of some re-exports that remove stale keys.
select x.id from {schema}.reexports x where x.id = any (%(reexports)s) and x.stale
