"""Which releases the tables serve, so that an older one can tell whether it may work.

Locks: `installation` exclusively for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# A migration that takes something away raises it, to the oldest version whose releases
# do without; one that only adds leaves it as it is.
UPGRADE = """
alter table installation add column compatible_from text not null default '0008';
"""

DOWNGRADE = "alter table installation drop column compatible_from;"


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
