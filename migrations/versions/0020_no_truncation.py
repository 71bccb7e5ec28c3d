"""Autovacuum gives no file back to the disk while callers and claims wait for it.

Locks: `jobs`, `claims` and `outbox` against vacuum and DDL for an instant; nobody who
reads or writes.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# What waits comes and goes, so at almost every vacuum there are empty pages at the end
# of these tables. To cut them off is to lock everybody out, callers' transactions among
# them, and the next jobs make the file longer again.
UPGRADE = r"""
alter table jobs set (vacuum_truncate = off);
alter table claims set (vacuum_truncate = off);
alter table outbox set (vacuum_truncate = off);
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("""
alter table jobs reset (vacuum_truncate);
alter table claims reset (vacuum_truncate);
alter table outbox reset (vacuum_truncate);
""")
