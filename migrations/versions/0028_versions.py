"""Send no version below 0: no consumer can compare it with another.

Locks: none that another session waits for; only functions are made and replaced.
"""

from __future__ import annotations

from alembic import op

revision = "0028_versions"
down_revision = "0027_streams"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- Refuses versions that consumers do not read: jobs_lib.kafka.checks.check_version.
create function check_version(topic text, version bigint) returns void
language plpgsql as $function$
begin
    if version < 0 then
        raise exception 'a version of the topic % is below 0', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give a number from 0 on that grows with each change.';
    end if;
end
$function$;

-- As before, but for the version.
create or replace function send(
    topic text,
    key text,
    value jsonb,
    version bigint default null,
    headers jsonb default null,
    notify boolean default true
) returns bigint language plpgsql as $function$
#variable_conflict use_variable
declare
    topic text := topic_name(topic);
    shard smallint := place_record(topic, key);
    size int := octet_length(value::text);
    new_id bigint;
begin
    perform check_key(topic, key);
    perform check_version(topic, version);
    if value is null and key is null then
        raise exception 'a tombstone of the topic % has no key', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give the key that is gone.';
    end if;
    if jsonb_typeof(headers) <> 'object' or jsonb_path_exists(
        headers, 'lax $.keyvalue() ? (@.value.type() <> "string")'
    ) then
        raise exception 'the headers of a record of % are no object of strings', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give them as in ''{"tenant": "acme"}''.';
    end if;
    if size > 400 then
        perform check_json('a value of ' || topic, value, size);
    end if;
    if key is not null then
        perform lock_in_order(
            hashtextextended('shard/' || shard, 7604),
            hashtextextended(topic || chr(1) || key, 7603)
        );
    end if;
    insert into outbox (shard, topic, key, value, version, headers)
    values (
        shard, topic, key, convert_to(value::text, 'UTF8'), version,
        headers
    ) returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

create or replace function send_current(
    topic text, key text, entity text, version bigint, notify boolean default true
) returns bigint language plpgsql as $function$
#variable_conflict use_variable
declare
    topic text := topic_name(topic);
    new_id bigint;
begin
    perform check_key(topic, key);
    perform check_version(topic, version);
    if key is null or entity is null then
        raise exception 'a record of the topic % lacks its key or its entity', topic
            using errcode = 'invalid_parameter_value',
                hint = 'The relay reads the state of an entity by its key.';
    end if;
    -- Few transactions have said this: the others only pay for the look.
    if current_setting('jobs_lib.reexporting', true) <> '' then
        new_id := write_reexported(
            place_record(topic, key), topic, key, entity, version
        );
        if new_id is not null then
            return new_id;
        end if;
    end if;
    insert into outbox (shard, topic, key, entity, version)
    values (place_record(topic, key), topic, key, entity, version)
    returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

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
"""

DOWNGRADE = r"""
create or replace function send(
    topic text,
    key text,
    value jsonb,
    version bigint default null,
    headers jsonb default null,
    notify boolean default true
) returns bigint language plpgsql as $function$
#variable_conflict use_variable
declare
    topic text := topic_name(topic);
    shard smallint := place_record(topic, key);
    size int := octet_length(value::text);
    new_id bigint;
begin
    perform check_key(topic, key);
    if value is null and key is null then
        raise exception 'a tombstone of the topic % has no key', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give the key that is gone.';
    end if;
    if jsonb_typeof(headers) <> 'object' or jsonb_path_exists(
        headers, 'lax $.keyvalue() ? (@.value.type() <> "string")'
    ) then
        raise exception 'the headers of a record of % are no object of strings', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give them as in ''{"tenant": "acme"}''.';
    end if;
    if size > 400 then
        perform check_json('a value of ' || topic, value, size);
    end if;
    if key is not null then
        perform lock_in_order(
            hashtextextended('shard/' || shard, 7604),
            hashtextextended(topic || chr(1) || key, 7603)
        );
    end if;
    insert into outbox (shard, topic, key, value, version, headers)
    values (
        shard, topic, key, convert_to(value::text, 'UTF8'), version,
        headers
    ) returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

create or replace function send_current(
    topic text, key text, entity text, version bigint, notify boolean default true
) returns bigint language plpgsql as $function$
#variable_conflict use_variable
declare
    topic text := topic_name(topic);
    new_id bigint;
begin
    perform check_key(topic, key);
    if key is null or entity is null then
        raise exception 'a record of the topic % lacks its key or its entity', topic
            using errcode = 'invalid_parameter_value',
                hint = 'The relay reads the state of an entity by its key.';
    end if;
    -- Few transactions have said this: the others only pay for the look.
    if current_setting('jobs_lib.reexporting', true) <> '' then
        new_id := write_reexported(
            place_record(topic, key), topic, key, entity, version
        );
        if new_id is not null then
            return new_id;
        end if;
    end if;
    insert into outbox (shard, topic, key, entity, version)
    values (place_record(topic, key), topic, key, entity, version)
    returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

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

drop function check_version;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
