"""A captured key that would change is refused without the keys.

Locks: nothing that anybody waits for: the trigger's function is replaced.
"""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0027"
branch_labels = None
depends_on = None

BEFORE = """\
raise exception 'the key % of % was to become %',
            quote_nullable(before), tg_relid::regclass, quote_nullable(after)
"""
AFTER = """\
raise exception 'the key % of % was to become another',
            quote_ident(tg_argv[2]), tg_relid::regclass
"""
REPLACE = """
do $replace$
declare
    definition text := pg_get_functiondef('capture_change()'::regprocedure);
begin
    -- Of the function as it is: other revisions change other parts of it.
    if position($text${old}$text$ in definition) = 0 then
        raise exception 'capture_change() does not refuse keys as it is known to';
    end if;
    execute replace(definition, $text${old}$text$, $text${new}$text$);
end
$replace$
"""


# The error of a statement goes into logs, and the keys are their owner's.
UPGRADE = REPLACE.format(old=BEFORE, new=AFTER)


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(REPLACE.format(old=AFTER, new=BEFORE))
