"""Which read models have been filled, and which of their versions is current.

Locks: ``offsets``, for as long as it takes to add two columns.
"""

from __future__ import annotations

from alembic import op

revision = "0020_versions"
down_revision = "0019_answers"
branch_labels = None
depends_on = None

UPGRADE = """
-- The topics that a group has once read to the end that they had when it began.
create table filled_topics (
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    filled_at timestamptz not null default clock_timestamp(),
    primary key (consumer_group, topic)
);

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

-- Which records of a versioned read model have effects elsewhere: those from the first
-- offset on, and before the second. Null for each: from the start, and without end.
alter table offsets add column effects_from bigint, add column effects_until bigint;

-- Those that are read already are no reason to be not ready.
insert into filled_topics (consumer_group, topic)
select distinct consumer_group, topic from offsets where next_offset is not null;
"""

DOWNGRADE = """
alter table offsets drop column effects_from, drop column effects_until;
drop table read_models, filled_topics;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
