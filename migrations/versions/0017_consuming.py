"""What consumers keep: blocks, failing and skipped records, keys of read models.

Locks: `offsets` and `gone_keys`, exclusively, for as long as it takes to add columns
without a value and to rename a table; running consumers wait that long at their next
commit. Pods from before that still run go on with handlers, and their read models stop:
these tables serve none of them at its next start.
"""

from __future__ import annotations

from alembic import op

revision = "0017_consuming"
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
    add column appended_at timestamptz,
    -- The highest `next_offset` that the partition of this topic ever had: the records
    -- below it come again. Null: as `next_offset`.
    add column highest_offset bigint,
    -- The record at which the partition stands still, why, and since when. Null: none.
    add column failed_offset bigint,
    add column failure text,
    add column failing_since timestamptz;

-- The topic of the record, as in `offsets`.
alter table skipped add column topic_id uuid;

-- What a read model knows of a key beside its row: that it is gone, or the place of its
-- last record where that had no version.
alter table gone_keys rename to model_keys;
alter table model_keys rename constraint gone_keys_pkey to model_keys_pkey;
alter table model_keys rename column gone_at to noted_at;
alter index gone_keys_at rename to model_keys_at;
alter table model_keys
    -- Null: the last record had none.
    alter column version drop not null,
    -- Whether the last record was a tombstone, or had no row.
    add column is_gone boolean not null default true,
    -- The place of the last record, and its timestamp in Kafka. Without versions they
    -- say which of two records is newer: the offset within a partition, else the time.
    add column topic_id uuid,
    add column partition int,
    add column record_offset bigint,
    add column appended_at timestamptz;

update installation set compatible_from = '0017_consuming';

-- As the function of the same name with fewer arguments, which pods from before still
-- call until they end. It also refuses a transaction that did not begin with the block:
-- a handler has ended that one, and the effects of earlier records may be gone.
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
"""

DOWNGRADE = """
update installation set compatible_from = '0001_installation';
delete from model_keys where version is null or not is_gone;
alter table model_keys
    drop column topic_id,
    drop column partition,
    drop column record_offset,
    drop column appended_at,
    drop column is_gone,
    alter column version set not null;
alter index model_keys_at rename to gone_keys_at;
alter table model_keys rename column noted_at to gone_at;
alter table model_keys rename constraint model_keys_pkey to gone_keys_pkey;
alter table model_keys rename to gone_keys;
alter table skipped drop column topic_id;
drop function advance_offset(
    text, text, int, uuid, bigint, bigint, bigint, timestamptz, text
);
alter table offsets
    drop column topic_id,
    drop column appended_at,
    drop column highest_offset,
    drop column failed_offset,
    drop column failure,
    drop column failing_since;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
