-- What may be set up wrong. Read-only; each look is bounded.

-- name: check_privileges
-- What the role of a running service needs and lacks.
with owned as (
    select c.oid, c.relname, c.relkind from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %(schema)s and c.relkind in ('r', 'p', 'v', 'S')
        -- Days of the history are reached through their parent.
        and (not c.relispartition or c.relname = 'history_default')
),
needed as (
    select t.oid, t.relname, t.relkind, p.privilege from owned t
    cross join lateral unnest(
        case
            when t.relkind = 'S' then array['usage']
            when t.relkind = 'v' or t.relname = 'jobs_lib_version' then array['select']
            else array['select', 'insert', 'update', 'delete']
        end
    ) as p(privilege)
)
select 'usage', 'schema ' || %(schema)s::text
where not has_schema_privilege(%(role)s::name, %(schema)s::text, 'usage')
union all
select n.privilege, n.relname from needed n
where case n.relkind
    when 'S' then not has_sequence_privilege(%(role)s::name, n.oid, n.privilege)
    else not has_table_privilege(%(role)s::name, n.oid, n.privilege)
end
union all
select 'execute', f.proname from pg_proc f
join pg_namespace n on n.oid = f.pronamespace and n.nspname = %(schema)s
where not has_function_privilege(%(role)s::name, f.oid, 'execute')
order by 2, 1

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
-- Dead rows that one of these may still see stay, in every table, and every scan reads
-- them. Other databases hold nothing up.
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
-- Without it, other roles' sessions are there, and their transactions are not.
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
-- Expected: a tuple header, a line pointer, padding and the columns as the statistics
-- know them, in pages nine tenths full.
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
-- Heads in backoff with many jobs of their group behind them. The longest backoffs of
-- each origin, so that the look is bounded.
with heads as (
    select j.* from {schema}.job_origins() as o(origin)
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
-- Origins that have jobs, whether their topic is declared, and whether anybody lives who
-- runs them.
select o.origin,
    exists (
        select from {schema}.topics t
        where t.topic = regexp_replace(o.origin, '/[0-9]+$', '')
    ),
    p.id is not null
from {schema}.job_origins() as o(origin)
left join {schema}.origins e on e.role = 'execute' and e.origin = o.origin
left join {schema}.processes p on p.id = e.owner
    and p.heartbeat_at > clock_timestamp() - make_interval(secs => %(stale_after)s)
order by 1

-- name: check_groups
-- Some jobs with a group of each origin of the home topic.
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

-- name: backend_pid
select pg_backend_pid()

-- name: check_touched
select operation, role, application, statements, last_at at time zone 'UTC'
from {schema}.touched order by last_at desc limit 10

-- name: check_triggers
-- Ours, wherever they are, that do not fire for an ordinary session.
select t.tgname, s.nspname, c.relname
from pg_trigger t
join pg_proc f on f.oid = t.tgfoid
join pg_namespace n on n.oid = f.pronamespace and n.nspname = %(schema)s
join pg_class c on c.oid = t.tgrelid
join pg_namespace s on s.oid = c.relnamespace
where t.tgenabled in ('D', 'R')
order by 2, 3, 1
