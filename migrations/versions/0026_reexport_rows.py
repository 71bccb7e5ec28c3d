"""An index that finds the rows of one re-export in the outbox.

Locks: `outbox`, for as long as it takes to make an index if the table's file is small.
If it is not, the index is left out: `jobs-lib check` says by which statement it is made
while everything runs.
"""

from __future__ import annotations

from alembic import op

revision = "0026_reexport_rows"
down_revision = "0025_streams"
branch_labels = None
depends_on = None

UPGRADE = """
-- The relay reads the rows of each re-export by themselves: those of one that may send
-- nothing now must not lie in the way of others. Live rows are not in the index. It
-- must not start with the shard: the planner would take the primary key instead. To
-- make it, the server reads the whole table, and nobody can publish meanwhile. So this
-- is only done while the file is small, and takes some hundredths of a second.
do $small$
begin
    if pg_relation_size('outbox') < 67108864 then
        create index outbox_of_reexport on outbox (coalesce(reexport_id, 0), shard, id)
            where class = 1;
    end if;
end
$small$;
"""

DOWNGRADE = """
drop index if exists outbox_of_reexport;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
