"""Re-exports that pause while a group of consumers is too far behind.

Locks: `reexports`, for a moment: adding columns without a computed default rewrites
nothing.
"""

from __future__ import annotations

from alembic import op

revision = "0027_watched_lag"
down_revision = "0026_reexport_rows"
branch_labels = None
depends_on = None

UPGRADE = """
alter table reexports
    -- Whose records a relay counts that are not handled yet; null: nobody's.
    add column lag_group text collate "C",
    -- With more of them it is paused, and with half of them it goes on.
    add column lag_limit bigint check (lag_limit > 0),
    -- Their number when it was last counted.
    add column lag bigint,
    -- Whether it is paused because of them, and not by a person.
    add column lagging boolean not null default false;
"""

DOWNGRADE = """
alter table reexports drop column lag_group, drop column lag_limit, drop column lag,
    drop column lagging;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
