"""Topics that re-exports empty and fill again, and new topics that they fill.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0026_rebuilds"
down_revision = "0025_reexport_states"
branch_labels = None
depends_on = None

UPGRADE = """
-- Topics that are emptied, to be filled by a re-export: the latest of each entity.
create table rebuilds (
    entity text collate "C" primary key,
    topic text collate "C" not null,
    -- As Kafka names the topic for ever: one that is made anew has other offsets.
    topic_id uuid,
    -- The offsets before which records are deleted, by partition.
    ends jsonb not null,
    -- The topic's own settings that are changed meanwhile, or null.
    former jsonb not null,
    began_at timestamptz not null default clock_timestamp(),
    emptied_at timestamptz,
    -- Re-exports up to this id began before the topic was empty.
    last_reexport bigint not null default 0,
    -- The one that fills it.
    reexport_id bigint
);

-- Topics that are fed with the changes that another topic gets.
create table topic_copies (
    topic text collate "C" not null,
    copy text collate "C" not null,
    -- Whose states both hold.
    entity text collate "C" not null,
    began_at timestamptz not null default clock_timestamp(),
    primary key (topic, copy)
);
"""

DOWNGRADE = """
drop table topic_copies, rebuilds;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
