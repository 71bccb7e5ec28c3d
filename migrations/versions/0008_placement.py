"""Where a group lives, and on which channels processes listen for hints.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0008_placement"
down_revision = "0007_completion"
branch_labels = None
depends_on = None

UPGRADE = """
-- The hash by which Kafka's clients place a key, and by which a group gets its origin.
-- It is the number that jobs_lib.partitioner.murmur2 computes, unsigned, of 32 bits.
create function murmur2(data bytea) returns bigint
language plpgsql immutable strict parallel safe as $function$
declare
    size constant int := octet_length(data);
    multiplier constant bigint := 1540483477;  -- 0x5bd1e995
    mask constant bigint := 4294967295;
    h bigint := 2538058380 # size::bigint;  -- 0x9747b28c
    k bigint;
    at int := 0;
begin
    while at + 4 <= size loop
        k := get_byte(data, at) | (get_byte(data, at + 1) << 8)
            | (get_byte(data, at + 2) << 16) | (get_byte(data, at + 3)::bigint << 24);
        k := k * multiplier & mask;
        k := (k # (k >> 24)) * multiplier & mask;
        h := (h * multiplier & mask) # k;
        at := at + 4;
    end loop;
    if at < size then
        for rest in reverse size - 1 .. at loop
            h := h # (get_byte(data, rest)::bigint << 8 * (rest - at));
        end loop;
        h := h * multiplier & mask;
    end if;
    h := (h # (h >> 13)) * multiplier & mask;
    return h # (h >> 15);
end
$function$;

-- The partition of a group among this number of partitions.
create function place_group("group" text, partitions int) returns bigint
language sql immutable strict parallel safe as $function$
    select (murmur2(convert_to("group", 'UTF8')) & 2147483647) % partitions
$function$;

-- The channel on which executors of this schema listen.
-- jobs_lib.postgres.database.channel makes the same name.
create function channel() returns text
language sql stable as $function$
    select case
        when octet_length(current_schema()) <= 58 then current_schema() || '.jobs'
        else lpad(to_hex(murmur2(convert_to(current_schema(), 'UTF8'))), 8, '0')
            || '.jobs'
    end
$function$;

-- The channel of another kind of listeners in this schema, such as the relays.
create function channel(kind text) returns text
language sql stable as $function$
    select case
        when octet_length(current_schema()) + 1 + octet_length(kind) <= 63
            then current_schema() || '.' || kind
        else lpad(to_hex(murmur2(convert_to(current_schema(), 'UTF8'))), 8, '0')
            || '.' || kind
    end
$function$;

-- The home topic and its number of partitions. They stay the same until the transaction
-- ends: a session that changes them must hold this lock alone.
create function hold_home_topic() returns topics
language plpgsql as $function$
declare
    home topics;
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('home', 7603));
    if current_setting('transaction_isolation') = 'read committed' then
        select * into home from topics t where t.home;
    else
        -- A snapshot from before the change would show the old home: an error.
        select * into home from topics t where t.home for share;
    end if;
    return home;
end
$function$;
"""

DOWNGRADE = """
drop function hold_home_topic;
drop function channel(text);
drop function channel();
drop function place_group, murmur2;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
