-- Find faults in the setup. All queries are read-only and bounded.

-- name: check_privileges
-- List the rights that a role lacks of its kind; a role without a kind is taken for a
-- running service.
with place (schema) as (values (%(schema)s::text)),
{noted},
grantee (role, kind) as (
    select n.role, n.kind from noted n where n.role = %(role)s::name
    union all
    -- The role has lost the right that marks its kind.
    select g.role, g.kind from {schema}.grantees g
    where g.role = %(role)s::name
        and not exists (select from noted n where n.role = g.role)
    union all
    select %(role)s::name, 'service'
    where not exists (select from {schema}.grantees g where g.role = %(role)s::name)
),
{needs}
select distinct n.privilege, n.name from needs n
where n.lacking
order by 2, 1

-- name: check_functions
-- List functions that find a session's temporary tables before ours, functions that lend
-- everybody the rights of their owner, and whether everybody may create functions.
with ours as (
    select p.oid, p.oid::regprocedure::text as name, p.proowner::regrole::text as owner,
        p.prosecdef, p.proacl, p.proowner, 'search_path=' || quote_ident(n.nspname)
            || ', pg_temp' = any (p.proconfig) is true as settled
    from pg_proc p
    join pg_namespace n on n.oid = p.pronamespace and n.nspname = %(schema)s
    where p.prokind in ('f', 'p') and (p.prosqlbody is null or p.prosecdef)
)
select 'path', name, owner from ours where not settled
union all
select 'everybody', name, owner from ours
where prosecdef and exists (
    select from aclexplode(coalesce(proacl, acldefault('f', proowner))) a
    where a.grantee = 0 and a.privilege_type = 'EXECUTE'
)
union all
select 'create', n.nspname, n.nspowner::regrole::text from pg_namespace n
where n.nspname = %(schema)s and exists (
    select from aclexplode(n.nspacl) a
    where a.grantee = 0 and a.privilege_type = 'CREATE'
)
order by 1, 2

-- name: check_role
select current_user::text, exists (select from pg_roles where rolname = %(role)s)

-- name: check_settings
select name, setting from pg_settings
where name in ('autovacuum', 'autovacuum_naptime', 'track_counts')

-- name: check_table_options
select c.relname from pg_class c
join pg_namespace n on n.oid = c.relnamespace and n.nspname = %(schema)s
where exists (
    select from pg_options_to_table(c.reloptions) o
    where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
)
order by 1

-- name: check_transactions
-- Dead rows that one of these transactions may still see stay in every table, and every
-- scan reads them. Transactions of other databases do no harm.
select 'transaction', extract(epoch from clock_timestamp() - xact_start)::float8,
    pid::text, coalesce(nullif(application_name, ''), 'an unnamed application'), state
from pg_stat_activity
where xact_start is not null and datname = current_database()
    and pid <> pg_backend_pid() and backend_type = 'client backend'
union all
select 'prepared transaction', extract(epoch from clock_timestamp() - prepared)::float8,
    gid, owner::text, 'prepared'
from pg_prepared_xacts where database = current_database()
order by 2 desc limit 5

-- name: check_sight
-- Without this right, sessions of other roles are visible, but not their transactions.
select pg_has_role('pg_read_all_stats', 'usage')

-- name: check_slots
select slot_name::text from pg_replication_slots
where not active and (xmin is not null or catalog_xmin is not null)
order by 1

-- name: check_dead_rows
select relname, n_live_tup, n_dead_tup from pg_stat_user_tables
where schemaname = %(schema)s and n_dead_tup >= %(dead)s and n_dead_tup > n_live_tup
order by n_dead_tup desc

-- name: check_indexes
-- The expected size: a tuple header, a line pointer, padding, and the columns' widths by
-- the statistics, in pages that are nine tenths full.
select i.relname, pg_relation_size(i.oid) as size, (
    greatest(i.reltuples, 0) * (16 + (
        select sum(coalesce(s.avg_width, 16)) from pg_attribute a
        left join pg_stats s on s.schemaname = n.nspname and s.tablename = t.relname
            and s.attname = a.attname
        where a.attrelid = i.oid
    )) / 0.9
)::bigint as expected
from pg_index x
join pg_class i on i.oid = x.indexrelid
join pg_class t on t.oid = x.indrelid
join pg_namespace n on n.oid = t.relnamespace and n.nspname = %(schema)s
join pg_am m on m.oid = i.relam and m.amname = 'btree'
where pg_relation_size(i.oid) >= %(bytes)s
order by 2 desc

-- name: check_statistics
select relname, n_live_tup, n_mod_since_analyze,
    greatest(last_analyze, last_autoanalyze)
from pg_stat_user_tables
where schemaname = %(schema)s and n_live_tup >= %(rows)s and (
    coalesce(last_analyze, last_autoanalyze) is null
    or n_mod_since_analyze > 2 * n_live_tup
)
order by n_live_tup desc

-- name: check_blocked
-- Find heads in backoff with many jobs of their group behind them. Only the longest
-- backoffs of each origin are read, so that the query is bounded.
with heads as (
    select j.origin, j."group", j.id, j.attempt, j.error
    from {schema}.job_origins() as o(origin)
    cross join lateral (
        select j.origin, j."group", j.id, j.attempt, j.errors -> -1 ->> 'error' as error
        from {schema}.jobs j
        where j.origin = o.origin and j.state = 'scheduled'
        order by j.run_at desc limit %(heads)s
    ) j
    where j."group" is not null and j.attempt > 0
)
select h."group", h.origin, h.id, h.attempt, h.error, b.behind from heads h
cross join lateral (
    select count(*) as behind from (
        select from {schema}.jobs j
        where j.origin = h.origin and j."group" = h."group" and j.id > h.id
        order by j.id limit %(counted)s
    ) rows
) b
where b.behind >= %(behind)s
order by b.behind desc, h.id limit 10

-- name: check_owners
-- List origins with jobs, whether their topic is declared, and whether they have a live
-- owner.
select o.origin,
    exists (
        select from {schema}.topics t
        where t.topic = regexp_replace(o.origin, '/[0-9]+$', '')
    ),
    exists (
        select from {schema}.origins e join {schema}.processes p on p.id = e.owner
        where e.role like 'execute%%' and e.origin = o.origin and {alive}
    )
from {schema}.job_origins() as o(origin)
order by 1

-- name: check_types
-- Find types, among the first jobs of each origin, that no live process knows, or that
-- only processes other than the owners know. A process that does not say its types, as of
-- an older release, counts as knowing all.
with alive as materialized (
    select p.id, p.types, p.roles from {schema}.processes p
    where {runs_jobs} and {alive}
),
waiting as materialized (
    select distinct o.origin, j.type
    from {schema}.job_origins() as o(origin)
    cross join lateral (
        select j.type from {schema}.jobs j
        where j.origin = o.origin order by j.id limit %(each)s
    ) j
)
select w.type, array_agg(w.origin order by w.origin) filter (
        where exists (select from alive) and not exists (
            select from alive a where a.types is null or w.type = any (a.types)
        )
    ) as nobody,
    array_agg(w.origin order by w.origin) filter (
        where not owners.knowing and exists (
            select from alive a
            where w.type = any (a.types) and a.roles && owners.roles
        )
    ) as another
from waiting w
cross join lateral (
    -- An executor of another app that knows the type owns the origin, too.
    select bool_or(a.types is null or w.type = any (a.types)) as knowing,
        array_agg(e.role) as roles
    from {schema}.origins e join alive a on a.id = e.owner
    where e.role like 'execute%%' and e.origin = w.origin
) owners
group by w.type order by w.type

-- name: check_multixacts
-- The table with the highest age decides when autovacuum begins.
select mxid_age(datminmxid)::bigint,
    current_setting('autovacuum_multixact_freeze_max_age')::bigint
from pg_database where datname = current_database()

-- name: check_groups
-- Read some jobs with a group in each origin of the home topic.
select j."group", j.origin, t.topic, t.partitions
from {schema}.topics t
join {schema}.job_origins() as o(origin)
    on regexp_replace(o.origin, '/[0-9]+$', '') = t.topic
cross join lateral (
    select j."group", j.origin from {schema}.jobs j
    where j.origin = o.origin and j."group" is not null
    order by j."group", j.id limit %(each)s
) j
where t.home

-- name: check_shards
select o.topic, o.key, o.shard, i.shards
from {schema}.installation i
cross join lateral (
    select topic, key, shard from {schema}.outbox limit %(rows)s
) o

-- name: check_consumed
select distinct consumer_group, topic from {schema}.offsets

-- name: backend_pid
select pg_backend_pid()

-- name: check_touched
select operation, role, application, statements, last_at at time zone 'UTC'
from {schema}.touched order by last_at desc limit 10

-- name: check_reexport_index
-- One that is invalid was not made to its end.
select 1 from pg_index i
where i.indexrelid = to_regclass(format('%%I.outbox_of_reexport', %(schema)s::text))
    and i.indisvalid

-- name: check_triggers
-- Find our triggers, on any table, that do not fire in an ordinary session.
select t.tgname, s.nspname, c.relname
from pg_trigger t
join pg_proc f on f.oid = t.tgfoid
join pg_namespace n on n.oid = f.pronamespace and n.nspname = %(schema)s
join pg_class c on c.oid = t.tgrelid
join pg_namespace s on s.oid = c.relnamespace
where t.tgenabled in ('D', 'R')
order by 2, 3, 1

-- name: check_truncates
-- Find captured tables that could be truncated without a word.
select s.nspname, c.relname
from pg_trigger t
join pg_proc f on f.oid = t.tgfoid and f.proname = 'capture_change'
join pg_namespace n on n.oid = f.pronamespace and n.nspname = %(schema)s
join pg_class c on c.oid = t.tgrelid
join pg_namespace s on s.oid = c.relnamespace
-- A partition has its parent's trigger.
where t.tgparentid = 0 and not exists (
    select from pg_trigger r
    join pg_proc g on g.oid = r.tgfoid and g.proname = 'refuse_truncate'
        and g.pronamespace = n.oid
    where r.tgrelid = t.tgrelid
)
order by 1, 2

-- name: check_stopped
select consumer_group, topic, partition, failed_offset, failure,
    failing_since at time zone 'UTC'
from (select o.* from {schema}.offsets o where {is_of_topic}) offsets
where {stands_still}
order by failing_since, topic, partition limit 10

-- name: check_skipped
-- A partition's first rows are counted, so that the query is bounded.
select f.consumer_group, f.topic, f.partition, s.skipped, s.first, s.error,
    s.since at time zone 'UTC'
from {schema}.offsets f
cross join lateral (
    select count(*) as skipped, min(few.record_offset) as first,
        (array_agg(few.error order by few.record_offset))[1] as error,
        min(few.skipped_at) as since
    from (
        select k.record_offset, k.error, k.skipped_at from {schema}.skipped k
        where (k.consumer_group, k.topic, k.partition)
            = (f.consumer_group, f.topic, f.partition)
        order by k.record_offset limit %(counted)s
    ) few
) s
where s.skipped > 0
order by s.since, f.topic, f.partition limit 10
