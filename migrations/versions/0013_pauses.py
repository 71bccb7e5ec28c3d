"""Pauses: jobs of a type, an origin or a group that must not run now.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0013_pauses"
down_revision = "0012_enqueue"
branch_labels = None
depends_on = None

UPGRADE = """
-- Jobs that must not run now: all of a type, of an origin, or of a group.
create table pauses (
    kind text not null check (kind in ('type', 'origin', 'group')),
    name text collate "C" not null,
    paused_at timestamptz not null default clock_timestamp(),
    primary key (kind, name)
);

-- How many pauses have ended. When the number has changed, executors look again at the
-- jobs that they have passed over. To read all pauses each time would cost too much.
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

DOWNGRADE = """
drop table resumes, pauses;
drop function count_resumes;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
