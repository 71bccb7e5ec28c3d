"""Slots: how many jobs of a limited type run at once, over all processes.

Locks: `processes` against heartbeats, for an instant; the table of slots is new.
"""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

UPGRADE = """
-- A row for each job of a limited type that may run: of all, or of those of a value.
create table slots (
    type text collate "C" not null,
    -- Of the limit's parameter; empty where the limit counts all jobs of the type.
    value text collate "C" not null,
    slot int not null check (slot > 0),
    owner uuid not null,
    -- Whether a process waits that has none, or fewer than the owner.
    wanted boolean not null default false,
    taken_at timestamptz not null default clock_timestamp(),
    primary key (type, value, slot)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);

create index slots_wanted on slots (owner, type) where wanted;
create index slots_owner on slots (owner, type);

-- Types for which all workers of the process are busy, or it has too few slots.
-- Null where nothing waits for either.
alter table processes add column busy jsonb;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("alter table processes drop column busy; drop table slots")
