"""Refuse to truncate a table whose changes are sent.

Locks: none that another session waits for; only a function is made.
"""

from __future__ import annotations

from alembic import op

revision = "0032_truncate"
down_revision = "0031_frames"
branch_labels = None
depends_on = None

UPGRADE = """
-- The trigger before each truncate of a table whose changes are sent: no trigger would
-- see the rows, so consumers would keep all of them for ever.
create function refuse_truncate() returns trigger
language plpgsql as $function$
begin
    raise exception 'the changes of % are sent, and a truncate names no rows to send',
        tg_relid::regclass
        using errcode = 'integrity_constraint_violation', hint = format(
            'Delete the rows instead. Or run "alter table %s disable trigger %I", '
            'truncate, enable it again, and send what is missing by "jobs-lib reexport '
            'stale" and "jobs-lib reexport start".',
            tg_relid::regclass, tg_name
        );
end
$function$;
"""

DOWNGRADE = """
drop function refuse_truncate;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
