"""Which read models have been filled, and which of their versions is current.

Locks: ``offsets``, for as long as it takes to add two columns.
"""

from __future__ import annotations

from alembic import op

revision = "0020_versions"
down_revision = "0018_resyncs"
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

-- Those that are read already are no reason to be not ready.
insert into filled_topics (consumer_group, topic)
select distinct consumer_group, topic from offsets where next_offset is not null;
"""

DOWNGRADE = """
drop table filled_topics;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
