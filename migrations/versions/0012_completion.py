"""A completion in the job's own transaction is planned once.

By itself PostgreSQL plans it anew each time, since its guess for arrays of any length
is high; that took two thirds of the time of the call.

Locks: none that anybody waits for.
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

UPGRADE = "alter function complete_job set plan_cache_mode = 'force_generic_plan';"

DOWNGRADE = "alter function complete_job reset plan_cache_mode;"


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
