-- The versions of read models: which is current, and how another one becomes so.

-- name: read_current_versions
select model, version from {schema}.read_models
where is_current and model = any (%(models)s::text[])

-- name: hold_current_versions
-- The same once no switch is under way; none begins until this transaction has ended. The
-- condition stands outside: a row may have changed while it was waited for.
with held as materialized (
    select model, version, is_current from {schema}.read_models
    where model = any (%(models)s::text[])
    order by model, version
    for share
)
select model, version from held where is_current

-- name: add_current_version
-- The first version that a database hears of. If two processes begin at once, one adds it.
insert into {schema}.read_models
    (model, version, tables, consumer_group, topic, is_current, current_since)
select %(model)s, %(version)s, %(tables)s, %(group)s, %(topic)s, true, clock_timestamp()
where not exists (select from {schema}.read_models where model = %(model)s)
on conflict do nothing

-- name: add_version
insert into {schema}.read_models as m
    (model, version, tables, consumer_group, topic, is_current)
values (%(model)s, %(version)s, %(tables)s, %(group)s, %(topic)s, false)
on conflict (model, version) do update set
    tables = excluded.tables, consumer_group = excluded.consumer_group,
    topic = excluded.topic
where (m.tables, m.consumer_group, m.topic)
    is distinct from (excluded.tables, excluded.consumer_group, excluded.topic)

-- name: has_read
select exists (
    select from {schema}.offsets f
    where f.consumer_group = %(group)s and f.topic = %(topic)s
)

-- name: read_effects
-- Which records of the partitions have effects.
select o.topic, o.partition, o.effects_from, o.effects_until
from {schema}.offsets o
where o.consumer_group = %(group)s and o.topic = any (%(topics)s::text[])

-- name: read_versions
select m.version, m.tables, m.consumer_group, m.topic, m.is_current
from {schema}.read_models m
where m.model = %(model)s
order by m.version
for update

-- name: stop_resyncs
-- None begins until this transaction has ended. It would write a table by the name that
-- it had before.
lock table {schema}.resyncs in share row exclusive mode

-- name: find_resyncs
select model from {schema}.resyncs where model = any (%(models)s::text[])

-- name: find_behind
-- How many records of the version before the other one has not applied. Where no record was
-- left to apply, it has reached the end, and its offset lags for ever. That counts unless
-- it was set back since.
select coalesce(sum(greatest(
    0, o.next_offset - greatest(coalesce(n.next_offset, 0), coalesce(r.reached, 0))
)), 0)::bigint
from {schema}.offsets o
left join {schema}.offsets n on n.consumer_group = %(group)s
    and n.topic = o.topic and n.partition = o.partition
left join unnest(%(partitions)s::int[], %(stored)s::bigint[], %(reached)s::bigint[])
    as r(partition, stored, reached)
    on r.partition = o.partition and r.stored <= coalesce(n.next_offset, 0)
where o.consumer_group = %(before)s and o.topic = %(topic)s
    and {is_of_topic}

-- name: find_skipped_alone
-- The first record that one version has skipped and the other has not, and how many there
-- are. Those of an earlier topic of this name do not count.
select s.partition, s.record_offset, s.error, count(*) over ()
from {schema}.skipped s
join {schema}.offsets f using (consumer_group, topic, partition)
where s.consumer_group = %(group)s and s.topic = %(topic)s
    and (s.topic_id is null or f.topic_id is null or s.topic_id = f.topic_id)
    and not exists (
        select from {schema}.skipped o
        where (o.consumer_group, o.topic, o.partition, o.record_offset)
                = (%(before)s, s.topic, s.partition, s.record_offset)
            and o.topic_id is not distinct from s.topic_id
    )
order by s.partition, s.record_offset
limit 1

-- name: make_offsets_before
-- The version before may not have taken a new partition yet: then it gets a row here.
insert into {schema}.offsets (consumer_group, topic, partition)
select %(before)s, n.topic, n.partition
from {schema}.offsets n
where n.consumer_group = %(group)s and n.topic = %(topic)s
on conflict (consumer_group, topic, partition) do nothing

-- name: begin_effects
-- The version before has the effects of the records up to here, if it has not come so far.
-- It must see the rows that are made just now, so it is a statement of its own.
with begun as (
    update {schema}.offsets n set
        effects_from = coalesce(n.next_offset, 0), effects_until = null
    where n.consumer_group = %(group)s and n.topic = %(topic)s
    returning n.topic, n.partition, n.effects_from
)
update {schema}.offsets o set effects_until = b.effects_from
from begun b
where o.consumer_group = %(before)s and o.topic = b.topic and o.partition = b.partition

-- name: end_current_version
update {schema}.read_models set is_current = false
where model = %(model)s and is_current

-- name: begin_current_version
update {schema}.read_models set is_current = true, current_since = clock_timestamp()
where model = %(model)s and version = %(version)s

-- name: find_dependents
-- What would go on to use the table under its other name.
select 'the view ' || c.oid::regclass::text
from pg_depend d
join pg_rewrite r on r.oid = d.objid and d.classid = 'pg_rewrite'::regclass
join pg_class c on c.oid = r.ev_class
where d.refclassid = 'pg_class'::regclass and d.refobjid = any (%(tables)s::regclass[])
    and c.oid <> all (%(tables)s::regclass[])
union
select 'the foreign key ' || k.conname || ' of ' || k.conrelid::regclass::text
from pg_constraint k
where k.contype = 'f' and k.confrelid = any (%(tables)s::regclass[])
    and k.conrelid <> all (%(tables)s::regclass[])
union
-- One whose body is parsed when it is made.
select 'the function ' || d.objid::regprocedure::text
from pg_depend d
where d.classid = 'pg_proc'::regclass
    and d.refclassid = 'pg_class'::regclass and d.refobjid = any (%(tables)s::regclass[])
union
select 'the policy ' || p.polname || ' of ' || p.polrelid::regclass::text
from pg_depend d join pg_policy p on p.oid = d.objid and d.classid = 'pg_policy'::regclass
where d.refclassid = 'pg_class'::regclass and d.refobjid = any (%(tables)s::regclass[])
    and p.polrelid <> all (%(tables)s::regclass[])
union
select 'the publication ' || p.pubname
from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
where r.prrelid = any (%(tables)s::regclass[])
order by 1

-- name: find_readers
-- Who may read a table, null for everybody, and whether policies say which rows.
select array(
    select distinct r.rolname::text
    from aclexplode(c.relacl) a left join pg_roles r on r.oid = a.grantee
    where a.privilege_type = 'SELECT' and a.grantee <> c.relowner
), c.relrowsecurity
from pg_class c where c.oid = %(table)s::regclass

-- name: find_column_readers
-- Who may read single columns of a table, null for everybody.
select t.attname::text, r.rolname::text
from pg_class c
join pg_attribute t on t.attrelid = c.oid and not t.attisdropped
cross join aclexplode(t.attacl) a
left join pg_roles r on r.oid = a.grantee
where c.oid = %(table)s::regclass
    and a.privilege_type = 'SELECT' and a.grantee <> c.relowner
order by 1, 2

-- name: find_readers_of_version
-- The processes that still apply records in this group.
select distinct p.pod
from {schema}.origins o join {schema}.processes p on p.id = o.owner
where o.role = 'consume:' || %(group)s
order by 1

-- name: count_untold
-- How many records a version has not come to of which it alone tells.
select coalesce(sum(o.effects_until - coalesce(o.next_offset, 0)), 0)::bigint
from {schema}.offsets o
where o.consumer_group = %(group)s and o.topic = %(topic)s
    and o.effects_until > coalesce(o.next_offset, 0) and {is_of_topic}

-- name: forget_progress
with offsets_gone as (
    delete from {schema}.offsets where consumer_group = %(group)s and topic = %(topic)s
), origins_gone as (
    delete from {schema}.origins where role = 'consume:' || %(group)s
), skipped_gone as (
    delete from {schema}.skipped where consumer_group = %(group)s and topic = %(topic)s
)
delete from {schema}.filled_topics
where consumer_group = %(group)s and topic = %(topic)s

-- name: forget_version_keys
-- The next ones of a version's keys, and the last of them; none once somebody keeps it.
with few as materialized (
    select k.key from {schema}.model_keys k
    where k.model = %(name)s and k.key > %(after)s and not exists (
        select from {schema}.origins o join {schema}.processes p on p.id = o.owner
        where o.role = 'consume:' || %(group)s
    )
    order by k.key
    limit %(rows)s
), gone as (
    delete from {schema}.model_keys k using few f
    where k.model = %(name)s and k.key = f.key
)
select max(few.key) from few

-- name: forget_version
-- The keys are those that have come since the others went.
with keys_gone as (
    delete from {schema}.model_keys where model = %(name)s
)
delete from {schema}.read_models where model = %(model)s and version = %(version)s
