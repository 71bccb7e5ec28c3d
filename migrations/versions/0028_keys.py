"""Keys of several columns and of any type, and re-exports of one snapshot.

Locks: `reexports`, for a moment: adding a column without a default rewrites nothing.
A trigger that runs meanwhile uses the old function or the new one.
"""

from __future__ import annotations

from alembic import op

revision = "0028_keys"
down_revision = "0027_watched_lag"
branch_labels = None
depends_on = None

UPGRADE = """
alter table reexports
    -- The snapshot from which a loader reads all ranges; 'lost' if others were loaded
    -- without it after that loader had ended. Null: nobody asked for one.
    add column snapshot text collate "C";

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
create or replace function capture_change() returns trigger
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
    -- anything else, which must not cost the caller's change.
    if tg_op = 'DELETE' or last_version = end_version then
        end_version := null;
        if last_version ~ '^-?[0-9]{1,19}$'
            and last_version::numeric >= -9223372036854775808
            and last_version::numeric < 9223372036854775807
        then
            end_version := last_version::bigint + 1;
        end if;
    elsif end_version !~ '^-?[0-9]{1,19}$'
        or end_version::numeric not between -9223372036854775808 and 9223372036854775807
    then
        end_version := null;
    end if;
    perform send_current(
        tg_argv[0], coalesce(after, before), tg_argv[1], end_version::bigint
    );
    return null;
end
$function$;
"""

DOWNGRADE = """
create or replace function capture_change() returns trigger
language plpgsql as $function$
declare
    was jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
    is_now jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
    before text := was ->> tg_argv[2];
    after text := is_now ->> tg_argv[2];
    version_column text := coalesce(tg_argv[3], 'version');
    last_version text := was ->> version_column;
    end_version text := is_now ->> version_column;
begin
    if tg_op = 'UPDATE' and before is distinct from after then
        -- Without the keys: the text goes into logs, and they are their owner's.
        raise exception 'the key % of % was to become another',
            quote_ident(tg_argv[2]), tg_relid::regclass
            using errcode = 'integrity_constraint_violation', hint =
                'One entity has one key for ever: delete it and insert another.';
    end if;
    -- Of each change: an updated row may be gone when its record leaves, or be one that
    -- the entity's function leaves out. Its version is the change's own, and follows
    -- the row's last one where the change has none. A column of that name may hold
    -- anything else, which must not cost the caller's change.
    if tg_op = 'DELETE' or last_version = end_version then
        end_version := null;
        if last_version ~ '^-?[0-9]{1,19}$'
            and last_version::numeric >= -9223372036854775808
            and last_version::numeric < 9223372036854775807
        then
            end_version := last_version::bigint + 1;
        end if;
    elsif end_version !~ '^-?[0-9]{1,19}$'
        or end_version::numeric not between -9223372036854775808 and 9223372036854775807
    then
        end_version := null;
    end if;
    perform send_current(
        tg_argv[0], coalesce(after, before), tg_argv[1], end_version::bigint
    );
    return null;
end
$function$;
drop function row_key;
alter table reexports drop column snapshot;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
