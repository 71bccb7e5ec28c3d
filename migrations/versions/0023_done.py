"""How far the jobs of a group's records are done, and where to look for what is not.

Locks: `offsets`, for as long as it takes to add two columns without a value.
"""

from __future__ import annotations

from alembic import op

revision = "0023_done"
down_revision = "0022_places"
branch_labels = None
depends_on = None

UPGRADE = """
alter table offsets
    -- No unfinished job has a place before this offset. Null: look from the start.
    add column done_offset bigint,
    -- Of the jobs with that place, none below this id is unfinished. Null: as 0.
    add column done_id bigint;

-- As before, and where the offset was set back, it takes `done_offset` back, too: in
-- the transaction that makes jobs with places before it.
create or replace function advance_offset(
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
create or replace function advance_offset(
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
        failed_offset = null, failure = null, failing_since = null
    where f.consumer_group = advance_offset.consumer_group
        and f.topic = advance_offset.topic and f.partition = advance_offset.partition
        and f.next_offset is not distinct from advance_offset.expected;
    if not found then
        raise exception 'the offset of %/% is no longer %', topic, partition, expected
            using errcode = 'JB004';
    end if;
end
$function$;
alter table offsets drop column done_offset, drop column done_id;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
