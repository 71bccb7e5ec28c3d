"""Offsets of consumers, topics that they have read, and records that they have skipped.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0019_consumers"
down_revision = "0018_holds"
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
    -- The topic that the offset belongs to, as Kafka names it for ever: one that was
    -- deleted and made anew has another id. Null: not known yet, or an operator has
    -- decided that the offset holds.
    topic_id uuid,
    -- The timestamp in Kafka of the record before `next_offset`. Null: no record was
    -- handled yet.
    appended_at timestamptz,
    -- The highest `next_offset` that the partition of this topic ever had: the records
    -- below it come again. Null: as `next_offset`.
    highest_offset bigint,
    -- The record at which the partition stands still, why, and since when. Null: none.
    failed_offset bigint,
    failure text,
    failing_since timestamptz,
    -- Which records of a versioned read model have effects elsewhere: those from the
    -- first offset on, and before the second. Null for each: from the start, and
    -- without end.
    effects_from bigint,
    effects_until bigint,
    -- No unfinished job has a place before this offset. Null: look from the start.
    done_offset bigint,
    -- Of the jobs with that place, none below this id is unfinished. Null: as 0.
    done_id bigint,
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
    -- The topic of the record, as in `offsets`.
    topic_id uuid,
    primary key (consumer_group, topic, partition, record_offset)
);

-- The topics that a group has once read to the end that they had when it began.
create table filled_topics (
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    filled_at timestamptz not null default clock_timestamp(),
    primary key (consumer_group, topic)
);

-- Moves an offset in the transaction that applied the records before it. If the
-- partition has another owner, or the offset is not where this process left it, the
-- function raises instead of returning. Then the commit that follows it in the same
-- round trip becomes a rollback.
-- The function also refuses a transaction that did not begin with the block: a handler
-- has ended that one, and the effects of earlier records may be gone. Where the offset
-- was set back, the function takes `done_offset` back, too: in the transaction that
-- makes jobs with places before it.
create function advance_offset(
    consumer_group text, topic text, partition int, owner uuid, epoch bigint,
    expected bigint, next_offset bigint, appended_at timestamptz, block text
) returns void language plpgsql as $function$
begin
    if current_setting('jobs_lib.block', true) is distinct from block then
        raise exception 'a handler has ended the transaction of its block'
            using errcode = 'JB003';
    end if;
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
        highest_offset = greatest(
            f.highest_offset, f.next_offset, advance_offset.next_offset
        ),
        appended_at = advance_offset.appended_at, updated_at = clock_timestamp(),
        failed_offset = null, failure = null, failing_since = null,
        done_offset = case when advance_offset.expected <= f.done_offset
            then advance_offset.expected
            when advance_offset.expected is not null then f.done_offset end,
        done_id = case when advance_offset.expected > f.done_offset then f.done_id end
    where f.consumer_group = advance_offset.consumer_group
        and f.topic = advance_offset.topic and f.partition = advance_offset.partition
        and f.next_offset is not distinct from advance_offset.expected;
    if not found then
        raise exception 'the offset of %/% is no longer %', topic, partition, expected
            using errcode = 'JB004';
    end if;
end
$function$;
"""

DOWNGRADE = """
drop function advance_offset;
drop table filled_topics, skipped, offsets;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
