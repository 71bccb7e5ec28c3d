"""Send the state of an entity by the triggers of its table.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0017_capture"
down_revision = "0016_send"
branch_labels = None
depends_on = None

UPGRADE = """
-- The text of a row's key, as re-exports write it, whatever the caller's session has
-- set: that of its column; or the JSON array of the texts of several columns. It is
-- null if one of them is null.
create function row_key(changed anyelement, columns text[]) returns text
language plpgsql
set timezone = 'UTC' set datestyle = 'ISO, YMD' set intervalstyle = 'postgres'
set bytea_output = 'hex' set extra_float_digits = 1
as $function$
declare
    texts text;
    present text;
    key text;
begin
    select string_agg(format('($1).%I::text', c.name), ', ' order by c.n),
        string_agg(format('($1).%I::text is not null', c.name), ' and ')
    into texts, present
    from unnest(columns) with ordinality as c(name, n);
    if cardinality(columns) > 1 then
        texts := 'json_build_array(' || texts || ')::text';
    end if;
    execute 'select ' || texts || ' where ' || present into key using changed;
    return key;
end
$function$;

-- The trigger of a table whose changes are sent. Its arguments: the topic, the entity,
-- the column of the key, the column of the version (`version` by default), and the
-- further columns of the key.
create function capture_change() returns trigger
language plpgsql as $function$
declare
    was jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
    is_now jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
    columns text[] := tg_argv[2:2] || tg_argv[4:];
    before text;
    after text;
    version_column text := coalesce(tg_argv[3], 'version');
    last_version text := was ->> version_column;
    end_version text := is_now ->> version_column;
begin
    -- JSON writes a value of these types as PostgreSQL does, and ten times as fast. It
    -- writes times, floats, padded texts and composite values in another way.
    if cardinality(columns) = 1 and exists (
        select from pg_catalog.pg_attribute a
        where a.attrelid = tg_relid and a.attname = columns[1] and a.atttypid in (
            'int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype,
            'text'::regtype, 'varchar'::regtype, 'uuid'::regtype
        )
    ) then
        before := was ->> columns[1];
        after := is_now ->> columns[1];
    else
        if tg_op <> 'INSERT' then
            before := row_key(old, columns);
        end if;
        if tg_op <> 'DELETE' then
            after := row_key(new, columns);
        end if;
    end if;
    if tg_op = 'UPDATE' and before is distinct from after then
        -- Without the keys: the text goes into logs, and they are their owner's.
        raise exception 'the key % of % was to become another',
            (select string_agg(quote_ident(c), ', ') from unnest(columns) c),
            tg_relid::regclass
            using errcode = 'integrity_constraint_violation', hint =
                'One entity has one key for ever: delete it and insert another.';
    end if;
    -- Of each change: an updated row may be gone when its record leaves, or be one that
    -- the entity's function leaves out. Its version is the change's own, and follows
    -- the row's last one where the change has none. A column of that name may hold
    -- anything else, or a number below 0: it must not cost the caller's change.
    if tg_op = 'DELETE' or last_version = end_version then
        end_version := null;
        if last_version ~ '^[0-9]{1,19}$'
            and last_version::numeric < 9223372036854775807
        then
            end_version := last_version::bigint + 1;
        end if;
    elsif end_version !~ '^[0-9]{1,19}$'
        or end_version::numeric > 9223372036854775807
    then
        end_version := null;
    end if;
    perform send_current(
        tg_argv[0], coalesce(after, before), tg_argv[1], end_version::bigint
    );
    return null;
end
$function$;

-- The trigger before each truncate of a table whose changes are sent: no trigger would
-- see the rows, so consumers would keep all of them for ever.
create function refuse_truncate() returns trigger
language plpgsql as $function$
begin
    raise exception 'the changes of % are sent, and a truncate names no rows to send',
        tg_relid::regclass
        using errcode = 'integrity_constraint_violation', hint = format(
            'Delete the rows instead. Or run "alter table %s disable trigger %I", '
            'truncate, enable it again, and send what is missing by "jobs-lib reexport '
            'stale" and "jobs-lib reexport start".',
            tg_relid::regclass, tg_name
        );
end
$function$;
"""

DOWNGRADE = """
drop function refuse_truncate, capture_change, row_key;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
