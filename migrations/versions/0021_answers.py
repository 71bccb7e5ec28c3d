"""Entities that updates have returned, until the read models have them.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0021_answers"
down_revision = "0020_read_models"
branch_labels = None
depends_on = None

UPGRADE = """
-- Entities as updates have returned them: all pods of a service answer with these until
-- the read model has their versions. The table is logged: a standby cannot read from an
-- unlogged one, so every answer that is read there would fail.
create table answers (
    -- The first table of the read model, as in `model_keys`.
    model text not null,
    key text not null,
    version bigint not null,
    -- Null: the update has removed the entity.
    value text,
    -- The bytes of `value`: to bound their sum, the values need not be read.
    bytes int not null,
    -- Whose offsets say how far the read model is.
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    put_at timestamptz not null default clock_timestamp(),
    primary key (model, key)
);
"""

DOWNGRADE = """
drop table answers;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
