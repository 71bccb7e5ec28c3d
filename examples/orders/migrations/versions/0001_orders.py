"""Make the shop's tables, and those of the library in a schema of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from jobs_lib import upgrade as upgrade_jobs_lib

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all in one transaction. A new release of the library is a new revision."""
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("customer", sa.String, nullable=False, index=True),
        sa.Column("cents", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column(
            "placed_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.func.now(),
        ),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_table(
        "totals",
        sa.Column("customer", sa.String, primary_key=True),
        sa.Column("cents", sa.Integer, nullable=False),
    )
    op.create_table(
        "parcels",
        sa.Column("order_id", sa.Integer, primary_key=True, autoincrement=False),
    )
    upgrade_jobs_lib(op.get_bind())


def downgrade() -> None:
    """Keep the library's tables: the jobs and rows that wait in them would be lost."""
    for table in ("parcels", "totals", "orders"):
        op.drop_table(table)
