-- What every run of the migrations ends with, in its transaction, whatever they did.

-- name: settle_functions
-- `create or replace` forgets a function's settings, and a new function may be called by
-- everybody. A name that a function looks up must never be that of a session's temporary
-- table: with `pg_temp` not named, PostgreSQL looks there first. A body that was bound
-- when it was made looks nothing up, and can be inlined.
do $settle$
declare
    path constant text := quote_ident(current_schema()) || ', pg_temp';
    one record;
begin
    for one in
        select p.oid::regprocedure as name, p.prosecdef,
            p.prosqlbody is null
                and ('search_path=' || path = any (p.proconfig)) is not true as loose
        from pg_proc p
        where p.prokind in ('f', 'p') and p.pronamespace = (
            select n.oid from pg_namespace n where n.nspname = current_schema()
        )
    loop
        if one.loose then
            execute 'alter routine ' || one.name || ' set search_path = ' || path;
        end if;
        if one.prosecdef then
            execute 'revoke execute on routine ' || one.name || ' from public';
        end if;
    end loop;
end
$settle$
