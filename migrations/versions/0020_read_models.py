"""Read models: what they know of a key beside its row, and their versions.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0020_read_models"
down_revision = "0019_consumers"
branch_labels = None
depends_on = None

UPGRADE = """
-- What a read model knows of a key beside its row: that it is gone, or the place of its
-- last record where that had no version. It keeps older records from bringing a key
-- back.
create table model_keys (
    -- The table of the read model, as its service names it.
    model text not null,
    key text not null,
    -- Null: the last record had none.
    version bigint,
    noted_at timestamptz not null default clock_timestamp(),
    -- Whether the removed state had the version of the record that removed it. If not,
    -- a state of that version is newer: the key has come back.
    of_equal boolean not null default false,
    -- Whether the last record was a tombstone, or had no row.
    is_gone boolean not null default true,
    -- The place of the last record, and its timestamp in Kafka. Without versions they
    -- say which of two records is newer: the offset within a partition, else the time.
    topic_id uuid,
    partition int,
    record_offset bigint,
    appended_at timestamptz,
    primary key (model, key)
);
-- Finds the oldest keys, to delete them; these mostly lie together.
create index model_keys_at on model_keys using brin (noted_at);

-- The versions of read models: one is current, others are filled beside it. Only models
-- that have been declared with a version are here.
create table read_models (
    -- The first table of the read model, by the name that readers know.
    model text not null,
    version int not null check (version > 0),
    -- All its tables, likewise.
    tables text[] not null,
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    is_current boolean not null,
    current_since timestamptz,
    primary key (model, version)
);
create unique index one_version_is_current on read_models (model) where is_current;
"""

DOWNGRADE = """
drop table read_models, model_keys;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
