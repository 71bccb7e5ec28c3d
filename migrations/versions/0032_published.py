"""All tables may be part of a publication, such as for a move to another server.

PostgreSQL refuses to update and delete published rows that it cannot name to a replica.
These tables have no key to name them by.

Locks: `holds`, and the part of the history for days without a partition, for an instant
each; nothing is written anew. Pods write there only when Kafka refuses a row, or before
the partition of a day is made.
"""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

UPGRADE = """
alter table holds replica identity full;
alter table history_default replica identity full;
"""

DOWNGRADE = """
alter table holds replica identity default;
alter table history_default replica identity default;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
