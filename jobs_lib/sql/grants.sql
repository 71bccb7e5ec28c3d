-- The grants of each kind of role, computed from the tables that exist.

-- part: needs
-- The rights that each `grantee (role, kind)` needs in the schema of `place (schema)`,
-- and whether the role lacks them. New objects of a migration are included at once.
relations as (
    select c.oid, c.relname::text as name, c.relkind, array(
        select a.attname::text from pg_attribute a
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        order by a.attnum
    ) as columns
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    join place on place.schema = n.nspname
    where c.relkind in ('r', 'p', 'v', 'S')
        -- Days of the history are reached through their parent.
        and (not c.relispartition or c.relname = 'history_default')
),
rights (kind, class, oid, name, privilege, columns) as (
    -- A service works with all tables, except those that migrations and triggers write.
    select 'service', case when r.relkind = 'S' then 'sequence' else 'table' end,
        r.oid, r.name, p.privilege, null::text[]
    from relations r
    cross join lateral unnest(
        case
            when r.relkind = 'S' then array['usage']
            when r.relkind = 'v' or r.name in (
                'jobs_lib_version', 'installation', 'grantees', 'touched'
            ) then array['select']
            else array['select', 'insert', 'update', 'delete']
        end
    ) as p(privilege)
    union all
    -- A reader sees everything except the contents of jobs and records.
    select 'read', case when r.relkind = 'S' then 'sequence' else 'table' end,
        r.oid, r.name, 'select', case when r.columns && secret.names then array(
            select c.name from unnest(r.columns) with ordinality as c(name, place)
            where c.name <> all (secret.names) order by c.place
        ) end
    from relations r
    -- A digest tells contents that can be guessed.
    cross join (values (array['payload', 'headers', 'value', 'digest'])) as secret(names)
    union all
    -- A role that enqueues draws no ids, changes nothing, and reads only what calls
    -- return.
    select 'enqueue', 'table', r.oid, r.name, w.privilege, w.columns
    from relations r
    join (values
        ('jobs', 'insert', array[
            'origin', 'type', 'group', 'state', 'payload', 'run_at', 'priority',
            'headers', 'unique_key'
        ]),
        ('jobs', 'insert', array['source', 'record_offset']),
        ('jobs', 'select', array['id', 'type', 'unique_key']),
        ('outbox', 'insert', array[
            'shard', 'topic', 'key', 'value', 'version', 'headers', 'entity'
        ]),
        ('outbox', 'select', array['id']),
        ('topics', 'select', null),
        -- For locking the row: repeatable read must not miss a change of the home topic.
        ('topics', 'update', array['lockable']),
        ('installation', 'select', null)
    ) as w(name, privilege, columns) on w.name = r.name
    -- Tables that are not upgraded to this release yet may lack some columns.
    where w.columns is null or w.columns <@ r.columns
    union all
    -- A role that answers from read models sees how far they are, and shares the entities
    -- that updates have returned.
    select 'answer', 'table', r.oid, r.name, w.privilege, w.columns
    from relations r
    join (values
        ('answers', 'select', null::text[]),
        ('answers', 'insert', null),
        ('answers', 'update', null),
        ('answers', 'delete', null),
        ('offsets', 'select', array[
            'consumer_group', 'topic', 'partition', 'next_offset', 'topic_id',
            'appended_at', 'failed_offset'
        ]),
        ('model_keys', 'select', array['model', 'key', 'version', 'is_gone']),
        ('read_models', 'select', null)
    ) as w(name, privilege, columns) on w.name = r.name
    where w.columns is null or w.columns <@ r.columns
    union all
    -- Only services may call functions with their owner's rights; nobody calls triggers.
    select k.kind, 'routine', p.oid, p.proname, 'execute', null
    from pg_proc p
    join pg_namespace n on n.oid = p.pronamespace
    join place on place.schema = n.nspname
    cross join (values ('service'), ('enqueue'), ('read')) as k(kind)
    where p.prokind in ('f', 'p') and (
        not p.prosecdef or k.kind = 'service' and p.prorettype <> 'trigger'::regtype
    )
    union all
    select k.kind, 'schema', n.oid, n.nspname, 'usage', null
    from pg_namespace n
    join place on place.schema = n.nspname
    cross join (values ('service'), ('enqueue'), ('answer'), ('read')) as k(kind)
),
needs as (
    select g.role, r.*, case r.class
        when 'schema' then not has_schema_privilege(g.role, r.oid, r.privilege)
        when 'routine' then not has_function_privilege(g.role, r.oid, r.privilege)
        when 'sequence' then not has_sequence_privilege(g.role, r.oid, r.privilege)
        else not has_table_privilege(g.role, r.oid, r.privilege) and (
            r.columns is null or exists (
                select from unnest(r.columns) as c(name)
                where not has_column_privilege(g.role, r.oid, c.name, r.privilege)
            )
        )
    end as lacking
    from grantee g join rights r on r.kind = g.kind
)

-- part: noted
-- The kinds that each role still has: it has kept a right that no lesser kind is granted.
-- If somebody took that right away, even by hand, it was on purpose; and a new role with
-- an old name never had it.
noted as (
    select g.role, g.kind
    from {schema}.grantees g
    join pg_roles r on r.rolname = g.role
    join pg_class c on c.relname = case g.kind
        when 'read' then 'processes' when 'answer' then 'answers' else 'jobs' end
    join pg_namespace n on n.oid = c.relnamespace
    join place on place.schema = n.nspname
    where has_schema_privilege(r.oid, n.oid, 'usage') and case g.kind
        when 'service' then has_table_privilege(r.oid, c.oid, 'delete')
        when 'answer' then has_table_privilege(r.oid, c.oid, 'insert')
        when 'read' then has_table_privilege(r.oid, c.oid, 'select')
        else has_column_privilege(r.oid, c.oid, 'payload', 'insert')
    end
)

-- part: grants
-- Write the `wanted` needs as statements: one for all objects with the same rights.
, objects as (
    select role, kind, class, case class
            when 'schema' then quote_ident(name)
            when 'routine' then oid::regprocedure::text
            else oid::regclass::text
        end as object,
        string_agg(privilege || coalesce(' (' || (
            select string_agg(quote_ident(c), ', ') from unnest(columns) as c
        ) || ')', ''), ', ' order by privilege) as privileges
    from wanted
    group by role, kind, class, oid, name
)
select 'grant ' || privileges || ' on ' || class || ' '
    || string_agg(object, ', ' order by object) || ' to ' || quote_ident(role)
from objects
group by role, kind, class, privileges
order by role, kind, class <> 'schema', class, privileges

-- name: hide_path
-- With this path, PostgreSQL writes every name with its schema.
select set_config('search_path', 'pg_catalog', true)

-- name: role_exists
select exists (select from pg_roles where rolname = %(role)s::name)

-- name: list_grants
with place (schema) as (values (%(schema)s::text)),
grantee (role, kind) as (values (%(role)s::name, %(kind)s::text)),
{needs},
wanted as (select * from needs)
{grants}

-- name: list_lacking
with place (schema) as (values (%(schema)s::text)),
grantee (role, kind) as (values (%(role)s::name, %(kind)s::text)),
{needs}
select distinct n.privilege || ' on ' || n.name from needs n where n.lacking order by 1

-- name: note_grantee
-- Note the role, so that each migration grants it rights on new objects.
select 'insert into ' || quote_ident(%(schema)s::text) || '.grantees (role, kind) values ('
    || quote_literal(%(role)s::name) || ', ' || quote_literal(%(kind)s::text)
    || ') on conflict do nothing'

-- name: list_revokes
-- Revoke every kind from a role, and delete its notes: then no migration grants it
-- anything.
select 'revoke all on ' || class || quote_ident(%(schema)s::text) || ' from '
    || quote_ident(%(role)s::name)
from unnest(array[
    'all tables in schema ', 'all sequences in schema ', 'all routines in schema ', 'schema '
]) as class
union all
select 'delete from ' || quote_ident(%(schema)s::text) || '.grantees where role = '
    || quote_literal(%(role)s::name)

-- name: owns_tables
-- Without rights on its own tables, the owner could not even migrate.
select exists (
    select from pg_class c join pg_namespace n on n.oid = c.relnamespace
    join pg_roles r on r.oid in (c.relowner, n.nspowner)
    where n.nspname = %(schema)s::name and r.rolname = %(role)s::name
)

-- name: list_ownership
-- Make a role the owner of the schema and of everything in it. Sequences of identity
-- columns and indexes follow their tables.
with place as (
    select n.oid, n.nspname, n.nspowner from pg_namespace n
    where n.nspname = %(schema)s::name
),
owned (step, what, owner) as (
    select 1, 'schema ' || quote_ident(nspname), nspowner from place
    union all
    select 2, case c.relkind when 'v' then 'view ' else 'table ' end
        || c.oid::regclass::text, c.relowner
    from pg_class c join place on place.oid = c.relnamespace
    where c.relkind in ('r', 'p', 'v')
    union all
    select 3, 'routine ' || p.oid::regprocedure::text, p.proowner
    from pg_proc p join place on place.oid = p.pronamespace
    where p.prokind in ('f', 'p')
)
select s.statement from (
    select 0 as step, 'create schema ' || quote_ident(%(schema)s::text)
        || ' authorization ' || quote_ident(%(role)s::name) as statement
    where not exists (select from place)
    union all
    select o.step, 'alter ' || o.what || ' owner to ' || quote_ident(%(role)s::name)
    from owned o
    where o.owner <> (select r.oid from pg_roles r where r.rolname = %(role)s::name)
) s
order by s.step, s.statement

-- name: settle_grants
-- At the end of every run of the migrations: a role that got a kind by `jobs-lib grants`,
-- and still has it, gets the rights that it lacks now.
do $settle$
declare
    statement text;
begin
    if to_regclass('grantees') is null then
        return;
    end if;
    for statement in
        with place (schema) as (select current_schema()::text),
        {noted},
        grantee (role, kind) as (select * from noted),
        {needs},
        wanted as (select * from needs where lacking)
        {grants}
    loop
        execute statement;
    end loop;
end
$settle$
