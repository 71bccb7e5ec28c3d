"""Tombstones carry versions, and keys that fit into no index are refused.

Locks: none that anybody waits for; only functions are made.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

UPGRADE = r"""
create or replace function check_key(topic text, key text) returns void
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
    -- It stands in indexes, of consumers as well: jobs_lib.outbox.topic.KEY_LIMIT.
    if octet_length(key) > 1000 then
        raise exception 'a key of the topic % has % bytes, the limit is 1000', topic,
            octet_length(key)
            using errcode = 'invalid_parameter_value',
                hint = 'Give a short stable id, or a digest.';
    end if;
end
$function$;

-- A record whose value the relay reads when it leaves: the entity's state then, or a
-- tombstone, which gets this version. It needs no lock: whatever it finds is not older
-- than this change. No default: the calls without a version are the other function's.
create function send_current(
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
    insert into outbox (shard, topic, key, entity, version)
    values (place_record(topic, key), topic, key, entity, version)
    returning id into new_id;
    if notify then
        perform pg_notify(channel('outbox'), '');
    end if;
    return new_id;
end
$function$;

create or replace function send_current(
    topic text, key text, entity text, notify boolean default true
) returns bigint language plpgsql as $function$
begin
    return send_current(topic, key, entity, null::bigint, notify);
end
$function$;

-- The trigger of a table whose changes are sent: topic, entity, key column, and the
-- version's column, which triggers of older releases do not name.
create or replace function capture_change() returns trigger
language plpgsql as $function$
declare
    was jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
    is_now jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
    before text := was ->> tg_argv[2];
    after text := is_now ->> tg_argv[2];
    current_version text :=
        coalesce(is_now, was) ->> coalesce(tg_argv[3], 'version');
    end_version bigint;
begin
    if tg_op = 'UPDATE' and before is distinct from after then
        raise exception 'the key % of % was to become %',
            quote_nullable(before), tg_relid::regclass, quote_nullable(after)
            using errcode = 'integrity_constraint_violation', hint =
                'One entity has one key for ever: delete it and insert another.';
    end if;
    -- Of each change: an updated row may be gone when its record leaves. A column of
    -- that name may hold anything else, which must not cost the caller's change.
    if current_version ~ '^-?[0-9]{1,19}$'
        and current_version::numeric >= -9223372036854775808
        and current_version::numeric < 9223372036854775807
    then
        end_version := current_version::bigint + 1;
    end if;
    perform send_current(
        tg_argv[0], coalesce(after, before), tg_argv[1], end_version
    );
    return null;
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("drop function send_current(text, text, text, bigint, boolean)")
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    for revision in ("0015", "0023"):
        earlier = here.get_revision(revision).module.UPGRADE
        op.execute(earlier.replace("create function", "create or replace function"))
