"""Whoever changes rows of the outbox, and is not jobs_lib, leaves a note for the check.

Locks: `outbox` against writers for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- Statements on the outbox that jobs_lib has not made: a row of it is a promise.
create table touched (
    operation text not null,
    role text not null,
    application text not null,
    statements bigint not null,
    last_at timestamptz not null,
    primary key (operation, role, application)
);

-- By the statement, so that the relay pays for a block and not for a row.
create function note_touch() returns trigger
language plpgsql security definer set search_path from current as $function$
declare
    client text := current_setting('application_name');
begin
    if client not like 'jobs\_lib%' then
        insert into touched as t
        values (tg_op, session_user, client, 1, clock_timestamp())
        on conflict (operation, role, application) do update
            set statements = t.statements + 1, last_at = excluded.last_at;
    end if;
    return null;
end
$function$;

create trigger jobs_lib_touched before update or delete or truncate on outbox
    for each statement execute function note_touch();
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("""
drop trigger jobs_lib_touched on outbox;
drop function note_touch();
drop table touched;
""")
