"""Blocks of records: the transaction that began one, its topic, and its last record.

Locks: `offsets`, exclusively, for as long as it takes to add two columns without a
value; running consumers wait that long at their next commit.
"""

from __future__ import annotations

from alembic import op

revision = "0017_blocks"
down_revision = "0016_reexports"
branch_labels = None
depends_on = None

UPGRADE = """
alter table offsets
    -- The topic that the offset belongs to, as Kafka names it for ever: one that was
    -- deleted and made anew has another id. Null: not known yet, as in a row that an
    -- older release has written, or an operator has decided that the offset holds.
    add column topic_id uuid,
    -- The timestamp in Kafka of the record before `next_offset`. Null: an older release
    -- has written the row.
    add column appended_at timestamptz;

-- As the function of the same name with fewer arguments, which releases before this
-- one still call. It also refuses a transaction that did not begin with the block: a
-- handler has ended that one, and the effects of earlier records may be gone.
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
        appended_at = advance_offset.appended_at, updated_at = clock_timestamp()
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
drop function advance_offset(
    text, text, int, uuid, bigint, bigint, bigint, timestamptz, text
);
alter table offsets drop column topic_id, drop column appended_at;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
