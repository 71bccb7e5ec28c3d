"""Re-synchronisations of read models, and the keys that the topic has shown.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0022_resyncs"
down_revision = "0021_answers"
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
    started_at timestamptz not null default clock_timestamp(),
    -- How its processes note which keys there are, and which the topic has shown: 3 is
    -- by lists of both. Without a default, so that a release that notes them otherwise
    -- begins none.
    notes smallint not null check (notes = 3)
);

-- The ends of the topic's partitions when it began.
create table resync_parts (
    model text not null references resyncs on delete cascade,
    partition int not null,
    start_offset bigint not null,
    end_offset bigint not null,
    primary key (model, partition)
);

-- The keys that the model had when a re-synchronisation began, in lists. They are only
-- read as a whole: an index would cost more than all the rest.
create table resync_noted (
    model text not null,
    keys text[] not null,
    -- What was known of each key then: a row that has changed since stays.
    versions bigint[] not null,
    partitions int[] not null,
    record_offsets bigint[] not null
);
-- To compress the lists would take longer than to write them.
alter table resync_noted
    alter keys set storage external, alter versions set storage external,
    alter partitions set storage external, alter record_offsets set storage external;

-- The keys that the topic has shown since, a row for each block of records.
create table resync_shown (
    model text not null,
    keys text[] not null
);
-- Rows have no key, and a publication may contain the tables.
alter table resync_noted replica identity full;
alter table resync_shown replica identity full;

-- At the end: the keys that the topic has not shown.
create table resync_unshown (
    model text not null,
    key text not null,
    version bigint,
    partition int,
    record_offset bigint,
    primary key (model, key)
);
"""

DOWNGRADE = """
drop table resync_unshown, resync_shown, resync_noted, resync_parts, resyncs;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
