"""What a re-synchronisation notes of keys: a list for each block of records.

A re-synchronisation that has begun is forgotten: its processes end and remove no row,
and the next call begins anew. The release before cannot begin one any more, since it
would not see what this one notes. It still finds its table `resync_keys`.

Locks: ``resyncs``, for a moment.
"""

from __future__ import annotations

from alembic import op

revision = "0021_resync_shown"
down_revision = "0020_versions"
branch_labels = None
depends_on = None

UPGRADE = """
delete from resyncs;
delete from resync_keys;

-- How its processes note which keys the topic has shown: 2 is by lists. Without a
-- default, so that a release that notes them otherwise begins none.
alter table resyncs add column notes smallint not null check (notes = 2);

-- The keys that the model had when a re-synchronisation began. They are only read as a
-- whole: an index would cost more than all the rest.
create table resync_noted (
    model text not null,
    key text not null,
    -- What was known of the key then: a row that has changed since stays.
    version bigint,
    partition int,
    record_offset bigint
);

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
delete from resyncs;
drop table resync_noted, resync_shown, resync_unshown;
alter table resyncs drop column notes;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
