-- The tables of read models: how they are made, and what may be wrong with them.
-- `consuming/model_table.py` fills in the names in two braces.

-- name: make_model_table
-- With some room left on each page, an update stays on the page of its row, and changes
-- no index.
create table {{table}} (
    {{key}} {{key_sql_type}} primary key,
    version bigint{{columns}}
) with (fillfactor = {{fillfactor}})

-- name: mark_model_table
-- By this comment `jobs-lib check` finds the table, and its key.
comment on table {{table}} is {{mark}}

-- name: close_model_table
-- Default privileges may have granted rights on the new table, such as to the
-- application's role.
do $close$
declare
    holder text;
begin
    for holder in
        select distinct case a.grantee
            when 0 then 'public' else a.grantee::regrole::text
        end
        from pg_class c cross join aclexplode(c.relacl) a
        where c.oid = {{name}}::regclass and a.grantee <> c.relowner
    loop
        execute 'revoke all on table ' || {{name}} || ' from ' || holder;
    end loop;
end
$close$

-- name: keep_owner_out
-- The migrations often run as the application's role, which then owns the table. It could
-- grant itself the right again, but no statement of the application writes by accident.
revoke insert, update, delete, truncate on table {{table}} from current_user

-- name: let_write
grant select, insert, update, delete on table {{table}} to {{writer}}

-- name: let_read
grant select on table {{table}} to {{readers}}

-- name: find_model_tables
-- Look at the tables that read models declare, for the role that writes them.
with chosen (name, key, oid) as (
    select d.name, d.key, c.oid
    from unnest(%(names)s::text[], %(schemas)s::text[], %(tables)s::text[],
        %(keys)s::text[]) as d(name, schema, "table", key)
    left join lateral (
        select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relname = d."table" and c.relkind in ('r', 'p')
            and case when d.schema is null then pg_table_is_visible(c.oid)
                else n.nspname = d.schema end
    ) c on true
),
{model_tables}

-- name: find_marked_tables
-- The same for all tables that `create_read_model` has made: the mark names the key.
with chosen (name, key, oid) as (
    select case when pg_table_is_visible(c.oid) then '' else n.nspname || '.' end
        || c.relname, substring(d.description from %(mark)s), c.oid
    from pg_description d
    join pg_class c on c.oid = d.objoid
    join pg_namespace n on n.oid = c.relnamespace
    where d.classoid = 'pg_class'::regclass and d.objsubid = 0
        and c.relkind in ('r', 'p') and d.description ~ %(mark)s
),
{model_tables}

-- part: model_tables
judged as (
    select r.oid, r.rolname, r.rolsuper from pg_roles r
    where r.rolname = coalesce(%(role)s::name, current_user)
),
-- Roles of applications that only enqueue or read, by the notes of `jobs-lib grants`.
-- Nothing keeps a superuser from anything.
applications as (
    select r.oid, r.rolname from pg_roles r
    where not r.rolsuper and exists (
        select from {schema}.grantees g where g.role = r.rolname
    ) and not exists (
        select from {schema}.grantees g where g.role = r.rolname and g.kind = 'service'
    )
),
-- Who was granted the right to write a table, or one of its columns: the judged role
-- itself or a group of it, or others. The owner needs no grant. A role that may make
-- triggers decides what the consumer's role does.
granted as (
    select distinct c.oid, a.grantee, not r.rolsuper and a.grantee <> 0
        and pg_has_role(r.oid, nullif(a.grantee, 0), 'usage') as is_own
    from judged r
    cross join chosen join pg_class c on c.oid = chosen.oid
    cross join lateral (
        select e.grantee, e.privilege_type from aclexplode(c.relacl) e
        union all
        select e.grantee, e.privilege_type
        from pg_attribute t cross join aclexplode(t.attacl) e
        where t.attrelid = c.oid and not t.attisdropped
    ) a
    where a.grantee <> c.relowner
        and a.privilege_type in ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER')
)
select t.name, t.key, c.oid is not null as is_there,
    (
        select format_type(a.atttypid, a.atttypmod) from pg_attribute a
        where a.attrelid = c.oid and a.attname = 'version' and not a.attisdropped
    ) as version_type,
    exists (
        select from pg_attribute a
        where a.attrelid = c.oid and a.attname = t.key and a.attnum > 0
            and not a.attisdropped
    ) as has_key,
    exists (
        select from pg_index i
        join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
        where i.indrelid = c.oid and a.attname = t.key and i.indnkeyatts = 1
            and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
    ) as is_unique,
    r.rolname::text as role,
    c.relowner::regrole::text as owner,
    array(
        select n."right" from (values
            ('usage on its schema', not has_schema_privilege(
                r.oid, c.relnamespace, 'usage'
            )),
            ('select', not has_any_column_privilege(r.oid, c.oid, 'select')),
            ('insert', not has_any_column_privilege(r.oid, c.oid, 'insert')),
            ('update', not has_any_column_privilege(r.oid, c.oid, 'update')),
            ('delete', not has_table_privilege(r.oid, c.oid, 'delete'))
        ) as n("right", lacking) where n.lacking
    ) as lacking,
    -- As a superuser is of every table.
    pg_has_role(r.oid, c.relowner, 'usage') as is_owner,
    exists (select from granted g where g.oid = c.oid and g.is_own) as is_writer,
    exists (
        select from pg_roles o where o.oid = c.relowner and not o.rolsuper
            and has_table_privilege(o.oid, c.oid, 'insert, update, delete')
    ) as owner_writes,
    array(
        select case g.grantee when 0 then 'public' else g.grantee::regrole::text end
        from granted g where g.oid = c.oid and not g.is_own
        order by 1
    ) as others,
    array(
        select a.oid::regrole::text from applications a
        where a.oid <> r.oid
            and has_table_privilege(a.oid, c.oid, 'insert, update, delete, truncate')
        order by 1
    ) as applications
from chosen t
cross join judged r
left join pg_class c on c.oid = t.oid
order by t.name
