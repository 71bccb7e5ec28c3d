"""Executors ask whether a group is paused, instead of knowing all that are.

Locks: `pauses` against who pauses or resumes, for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- How often pauses have ended. When the number has changed, executors look again at
-- what they have passed over; to read all pauses each time would cost too much.
create table resumes (
    one boolean primary key default true check (one),
    count bigint not null default 0
) with (fillfactor = 50);
insert into resumes default values;

create function count_resumes() returns trigger
language plpgsql as $function$
begin
    update resumes set count = count + 1;
    return null;
end
$function$;

create trigger count_resumes after update or delete or truncate on pauses
for each statement execute function count_resumes();
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("""
drop trigger count_resumes on pauses;
drop function count_resumes;
drop table resumes;
""")
