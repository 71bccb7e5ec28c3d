"""Keys that read models have removed, so that no older record brings them back.

Locks: none; the table is new.
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

UPGRADE = """
create table gone_keys (
    -- The table of the read model, as its service names it.
    model text not null,
    key text not null,
    version bigint not null,
    gone_at timestamptz not null default clock_timestamp(),
    primary key (model, key)
);
-- To forget the oldest: they lie together, mostly.
create index gone_keys_at on gone_keys using brin (gone_at);
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("drop table gone_keys")
