"""Who last took jobs out of an origin past its owner, so that a claim can tell.

Locks: `origins` exclusively for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# A claim whose snapshot is older than this transaction still sees what it removed.
# A bigint, since SQLAlchemy does not know xid8.
UPGRADE = "alter table origins add column changed_by bigint;"

DOWNGRADE = "alter table origins drop column changed_by;"


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
