-- Every run of the migrations ends with this, in its transaction.

-- name: settle_functions
-- `create or replace` loses a function's settings, and everybody may call a new
-- function. A function must never take a session's temporary table for one of ours: if
-- `pg_temp` is not in its path, PostgreSQL looks there first. A body that was bound when
-- it was created looks up no names, and can be inlined.
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
