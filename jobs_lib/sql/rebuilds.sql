-- Rebuilds: a topic is emptied, and then filled by a re-export of its entity.

-- name: find_rebuild
select b.topic, b.topic_id, b.ends, b.former, b.last_reexport, b.emptied_at is not null,
    b.reexport_id is not null, coalesce(r.state in ('loading', 'running', 'paused'), false),
    b.began_at
from {schema}.rebuilds b left join {schema}.reexports r on r.id = b.reexport_id
where b.entity = %(entity)s

-- name: note_rebuild
-- Two that begin at once find the same row: the one that is faster has noted the ends.
insert into {schema}.rebuilds (entity, topic, topic_id, ends, former)
values (%(entity)s, %(topic)s, %(topic_id)s, %(ends)s::jsonb, %(former)s::jsonb)
on conflict (entity) do nothing

-- name: note_emptied
-- What a re-export sent that has begun by now may have been deleted. Of two processes the
-- one that is faster notes it, and then begins a re-export that counts.
update {schema}.rebuilds set emptied_at = clock_timestamp(), last_reexport = (
    select coalesce(max(r.id), 0) from {schema}.reexports r
)
where entity = %(entity)s and began_at = %(began_at)s and emptied_at is null

-- name: note_begun
update {schema}.rebuilds set reexport_id = %(reexport)s
where entity = %(entity)s and began_at = %(began_at)s

-- name: end_rebuild
-- Another process may have ended it meanwhile, and begun the next one.
delete from {schema}.rebuilds where entity = %(entity)s and began_at = %(began_at)s
