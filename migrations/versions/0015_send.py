"""Rows of the outbox from SQL and by triggers.

Locks: none that anybody waits for; the functions are new.
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- The shard of a record, as jobs_lib.partitioner.choose_shard computes it.
-- In PL/pgSQL, which plans it once: a function of SQL would be planned for every row.
create function place_record(topic text, key text) returns smallint
language plpgsql stable parallel safe set search_path from current as $function$
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

create function check_key(topic text, key text) returns void
language plpgsql set search_path from current as $function$
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
end
$function$;

-- A record whose value is JSON; null is a tombstone. The topic is named as a service
-- declares it. The ids of a key rise in the order in which their transactions commit,
-- since the key is locked before its id is drawn.
create function send(
    topic text,
    key text,
    value jsonb,
    version bigint default null,
    headers jsonb default null,
    notify boolean default true
) returns bigint language plpgsql set search_path from current as $function$
#variable_conflict use_variable
declare
    topic text := topic_name(topic);
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
    if key is not null then
        perform pg_advisory_xact_lock(hashtextextended(topic || chr(1) || key, 7603));
    end if;
    insert into outbox (shard, topic, key, value, version, headers)
    values (
        place_record(topic, key), topic, key, convert_to(value::text, 'UTF8'), version,
        headers
    ) returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

-- A record whose value the relay reads when it leaves: the entity's state then, or a
-- tombstone. It needs no lock: whatever it finds is not older than this change.
create function send_current(
    topic text, key text, entity text, notify boolean default true
) returns bigint language plpgsql set search_path from current as $function$
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
    insert into outbox (shard, topic, key, entity)
    values (place_record(topic, key), topic, key, entity) returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

-- The trigger of a table whose changes are sent: topic, entity, key column.
create function capture_change() returns trigger
language plpgsql set search_path from current as $function$
declare
    before text := case when tg_op <> 'INSERT' then to_jsonb(old) ->> tg_argv[2] end;
    after text := case when tg_op <> 'DELETE' then to_jsonb(new) ->> tg_argv[2] end;
begin
    if tg_op = 'UPDATE' and before is distinct from after then
        raise exception 'the key % of % was to become %',
            quote_nullable(before), tg_relid::regclass, quote_nullable(after)
            using errcode = 'integrity_constraint_violation', hint =
                'One entity has one key for ever: delete it and insert another.';
    end if;
    perform send_current(tg_argv[0], coalesce(after, before), tg_argv[1]);
    return null;
end
$function$;
"""

DOWNGRADE = """
drop function capture_change;
drop function send_current;
drop function send;
drop function check_key;
drop function place_record;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
