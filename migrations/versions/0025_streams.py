"""The streams that are published to, and what stops their publishers for a while.

Locks: none; the table is new.
"""

from __future__ import annotations

from alembic import op

revision = "0025_streams"
down_revision = "0024_requests"
branch_labels = None
depends_on = None

UPGRADE = """
-- Each process that publishes reads the rows of its streams again and again.
create table streams (
    topic text collate "C" primary key,
    -- How long an event may take from the reading of this row until it is in Kafka: the
    -- longest time of all processes that publish to it. It never gets shorter.
    send_seconds float8 not null,
    -- A command that adds partitions; null if none does. Nobody publishes between
    -- `renewed_at` and `stopped_until`, which the command moves on as long as it lives.
    grower uuid,
    partitions int,
    stopped_at timestamptz,
    renewed_at timestamptz,
    stopped_until timestamptz
);
"""

DOWNGRADE = """
drop table streams;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
