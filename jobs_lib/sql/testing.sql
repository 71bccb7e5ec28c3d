-- The test kit: list waiting jobs, read the next one, and move scheduled times.

-- name: kit_list
select id, type, "group", attempt, payload::text, run_at from {schema}.jobs order by id

-- name: kit_next
-- Read the job that runs next if one process runs all jobs, one by one: due jobs in the
-- order of enqueue, then the one that is due next. Only heads of groups run, as always. A
-- job of a `last_only` type gives way to a newer one, at once if it has failed.
select
    j.id, j.type, j.origin, j."group", j.attempt, j.payload::text, j.run_at,
    j.enqueued_at, j.headers, newer.is_there as superseded,
    case when j.state = 'scheduled' and not (newer.is_there and j.attempt > 0)
        then greatest(extract(epoch from j.run_at - clock_timestamp())::float8, 0) else 0
    end as wait
from {schema}.jobs j
cross join lateral (
    select j.type = any (%(last_types)s::text[]) and exists (
        select from {schema}.jobs n
        where n.origin = j.origin and n."group" = j."group" and n.type = j.type
            and n.id > j.id
    ) as is_there
) newer
where j.type = any (%(types)s::text[])
    and not exists (
        select from {schema}.jobs e
        where e.origin = j.origin and e."group" = j."group" and e.id < j.id
    )
    and not exists (
        select from {schema}.pauses p
        where (p.kind, p.name)
            in (('type', j.type), ('origin', j.origin), ('group', j."group"))
    )
order by wait, j.priority desc, j.id limit 1

-- name: kit_read
select
    j.id, j.type, j.origin, j."group", j.attempt, j.payload::text, j.run_at,
    j.enqueued_at, j.headers, false as superseded, 0::float8 as wait
from {schema}.jobs j where j.id = %(id)s and j.state = 'available'

-- name: kit_remove
delete from {schema}.jobs where id = %(id)s

-- name: kit_travel
-- The database's clock cannot be set, so all waiting jobs move to earlier times instead.
update {schema}.jobs set
    run_at = run_at - make_interval(secs => %(seconds)s),
    enqueued_at = enqueued_at - make_interval(secs => %(seconds)s)

-- name: kit_own
insert into {schema}.origins as o (role, origin, owner, epoch)
values ('execute', %(origin)s, %(owner)s, 1)
on conflict (role, origin) do update set owner = excluded.owner, epoch = o.epoch + 1
returning epoch

-- name: kit_locks
-- Say whether this transaction has changed rows of the table or read them `for update`:
-- plain reads lock it in a weaker mode. No row is returned for a missing table.
select case when exists (
    select from pg_locks l
    where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.relation = t.id
        and l.mode not in ('AccessShareLock', 'SIReadLock')
) then 'yes' else 'no' end
from (select to_regclass((
    select string_agg(quote_ident(part), '.' order by place)
    from unnest(string_to_array(cast(%(table)s as text), '.')) with ordinality
        as parts(part, place)
))) as t(id)
where t.id is not null

-- name: kit_outbox
select topic, key, value, version, headers, entity
from {schema}.outbox where class = 0 order by id
