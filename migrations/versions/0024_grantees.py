"""Who was granted what, so that a migration grants what it adds.

Locks: `topics` exclusively for an instant: against those who enqueue.
"""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

UPGRADE = """
create table grantees (
    role name not null,
    kind text not null check (kind in ('service', 'enqueue', 'read')),
    granted_at timestamptz not null default clock_timestamp(),
    primary key (role, kind)
);

-- To lock a row takes the right to update a column of it: of this one, which can have
-- no other value, for roles that only enqueue.
alter table topics add column lockable boolean not null default true check (lockable);
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("""
drop table grantees;
alter table topics drop column lockable;
""")
