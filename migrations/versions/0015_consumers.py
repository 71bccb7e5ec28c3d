"""Offsets of consumers, skipped records, and keys that read models have removed.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0015_consumers"
down_revision = "0014_holds"
branch_labels = None
depends_on = None

UPGRADE = """
create table offsets (
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    partition int not null,
    -- The offset to read next, as Kafka counts. Null: no record was handled yet.
    next_offset bigint check (next_offset >= 0),
    updated_at timestamptz not null default clock_timestamp(),
    primary key (consumer_group, topic, partition)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);

create table skipped (
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    partition int not null,
    record_offset bigint not null,
    error text not null,
    skipped_at timestamptz not null default clock_timestamp(),
    primary key (consumer_group, topic, partition, record_offset)
);

-- Moves an offset in the transaction that applied the records before it. If the
-- partition has another owner, or the offset is not where this process left it, the
-- function raises instead of returning. Then the commit that follows it in the same
-- round trip becomes a rollback.
create function advance_offset(
    consumer_group text, topic text, partition int, owner uuid, epoch bigint,
    expected bigint, next_offset bigint
) returns void language plpgsql as $function$
begin
    perform from origins o
    where o.role = 'consume:' || advance_offset.consumer_group
        and o.origin = advance_offset.topic || '/' || advance_offset.partition
        and o.owner = advance_offset.owner and o.epoch = advance_offset.epoch
    for share;
    if not found then
        raise exception 'partition %/% is no longer owned at epoch %',
            topic, partition, epoch using errcode = 'JB001';
    end if;
    update offsets f set next_offset = advance_offset.next_offset,
        updated_at = clock_timestamp()
    where f.consumer_group = advance_offset.consumer_group
        and f.topic = advance_offset.topic and f.partition = advance_offset.partition
        and f.next_offset is not distinct from advance_offset.expected;
    if not found then
        raise exception 'the offset of %/% is no longer %', topic, partition, expected
            using errcode = 'JB002';
    end if;
end
$function$;

-- Keys that read models have removed. They stop older records from bringing a key back.
create table gone_keys (
    -- The table of the read model, as its service names it.
    model text not null,
    key text not null,
    version bigint not null,
    gone_at timestamptz not null default clock_timestamp(),
    -- Whether the removed state had the version of the record that removed it. If not,
    -- a state of that version is newer: the key has come back.
    of_equal boolean not null default false,
    primary key (model, key)
);
-- Finds the oldest keys, to delete them; these mostly lie together.
create index gone_keys_at on gone_keys using brin (gone_at);
"""

DOWNGRADE = """
drop function advance_offset;
drop table gone_keys, skipped, offsets;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
