"""Send the state of an entity, in SQL or by the trigger of its table.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0013_capture"
down_revision = "0012_send"
branch_labels = None
depends_on = None

UPGRADE = """
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

-- The same without a version.
create function send_current(
    topic text, key text, entity text, notify boolean default true
) returns bigint language plpgsql as $function$
begin
    return send_current(topic, key, entity, null::bigint, notify);
end
$function$;

-- The trigger of a table whose changes are sent. Its arguments: the topic, the entity,
-- the column of the key, and the column of the version, `version` by default.
create function capture_change() returns trigger
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
"""

DOWNGRADE = """
drop function capture_change;
drop function send_current(text, text, text, boolean);
drop function send_current(text, text, text, bigint, boolean);
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
