"""A process says of which topics its executor follows the partitions.

Locks: `processes` exclusively for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

UPGRADE = """
-- Null: a release that did not say.
alter table processes add column topics text[];
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("alter table processes drop column topics")
