"""The roles that have rights on the tables.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0002_grantees"
down_revision = "0001_installation"
branch_labels = None
depends_on = None

UPGRADE = """
-- The kinds of rights that each role was granted. A later revision grants the role the
-- rights to what it adds.
create table grantees (
    role name not null,
    kind text not null check (kind in ('service', 'enqueue', 'answer', 'read')),
    granted_at timestamptz not null default clock_timestamp(),
    primary key (role, kind)
);
"""

DOWNGRADE = """
drop table grantees;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
