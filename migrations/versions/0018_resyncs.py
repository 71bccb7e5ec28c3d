"""Re-synchronisations of read models.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0018_resyncs"
down_revision = "0017_consuming"
branch_labels = None
depends_on = None

UPGRADE = """
-- Read models whose topic is read again beside the running service, until its end.
create table resyncs (
    -- The first table of the read model, as its service names it.
    model text primary key,
    topic text collate "C" not null,
    -- As in `offsets`: another topic of this name shows other keys.
    topic_id uuid,
    -- The group that reads it again.
    consumer_group text collate "C" not null,
    -- Where it begins: 'start', or a time or offset in words. Only from the start it
    -- shows all keys, and those that it does not show go at the end.
    begins text not null,
    started_at timestamptz not null default clock_timestamp()
);

-- The ends of the topic's partitions when it began.
create table resync_parts (
    model text not null references resyncs on delete cascade,
    partition int not null,
    start_offset bigint not null,
    end_offset bigint not null,
    primary key (model, partition)
);

-- The keys that the model had when it began, and that the topic has not shown since.
create table resync_keys (
    model text not null,
    key text not null,
    -- What was known of the key then: a row that has changed since stays.
    version bigint,
    partition int,
    record_offset bigint,
    primary key (model, key)
);
"""

DOWNGRADE = """
drop table resync_keys, resync_parts, resyncs;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
