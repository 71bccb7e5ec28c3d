"""Send a value, or the state of an entity, in SQL: for triggers, and other languages.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0016_send"
down_revision = "0015_outbox"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- The shard of a record, as jobs_lib.partitioner.choose_shard computes it. PL/pgSQL
-- plans the function once; a function in SQL would be planned for every row.
create function place_record(topic text, key text) returns smallint
language plpgsql stable parallel safe as $function$
declare
    digest bytea := sha256(
        convert_to(topic, 'UTF8') || '\x00'::bytea
        || convert_to(coalesce(key, ''), 'UTF8')
    );
begin
    return (get_byte(digest, 0) * 256 + get_byte(digest, 1))
        % (select i.shards from installation i);
end
$function$;

-- Refuses topics and keys that no record can have.
create function check_key(topic text, key text) returns void
language plpgsql as $function$
begin
    if topic is null or topic !~ '^[a-zA-Z0-9._-]{1,249}$' then
        raise exception '% is no name for a topic', quote_nullable(topic)
            using errcode = 'invalid_parameter_value',
                hint = 'Give 1 to 249 letters, digits and . _ - only.';
    end if;
    if key = '' then
        raise exception 'a key of the topic % is empty', topic
            using errcode = 'invalid_parameter_value',
                hint = 'Give the entity''s stable key.';
    end if;
    -- It stands in indexes, of consumers as well: jobs_lib.outbox.checks.KEY_LIMIT.
    if octet_length(key) > 1000 then
        raise exception 'a key of the topic % has % bytes, the limit is 1000', topic,
            octet_length(key)
            using errcode = 'invalid_parameter_value',
                hint = 'Give a short stable id, or a digest.';
    end if;
end
$function$;

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

-- Sends a record with a value of JSON; null is a tombstone. The caller names the topic
-- as a service declares it. The key is locked before the id is drawn, so the ids of a
-- key rise in the order in which their transactions commit.
create function send(
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

-- Sends a record whose value the relay reads at the last moment. The value is the state
-- of the entity at that moment, or a tombstone, which gets this version. The function
-- needs no lock: the state that the relay finds is not older than this change.
-- `version` has no default: calls without a version are for the other function.
create function send_current(
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

-- The same without a version.
create function send_current(
    topic text, key text, entity text, notify boolean default true
) returns bigint language plpgsql as $function$
begin
    return send_current(topic, key, entity, null::bigint, notify);
end
$function$;
"""

DOWNGRADE = """
drop function send_current(text, text, text, boolean);
drop function send_current(text, text, text, bigint, boolean);
drop function send, check_version, check_key, place_record;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
