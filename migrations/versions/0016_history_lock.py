"""Making a day of the history holds back those who write to any day.

Locks: none that anybody waits for; a function is made anew.
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

MAKE = r"""
create or replace function make_history(day date, most int) returns text
language plpgsql security definer as $function$
declare
    name text := 'history_' || to_char(day, 'YYYYMMDD');
    today date := (clock_timestamp() at time zone 'UTC')::date;
begin
    if day < today or day > today + 3661 then
        raise exception 'the history has no partition for %%', day;
    end if;
    if to_regclass(format('%%I.%%I', current_schema(), name)) is not null then
        return 'there';
    end if;
    %s
    if (
        select count(*) from (
            select from history_default d where d.keep_until = day limit most + 1
        ) rows
    ) > most then
        return 'crowded';
    end if;
    execute format('create table %%I (like history including all)', name);
    execute format(
        'with moved as (delete from history_default where keep_until = $1 returning *)'
        ' insert into %%I select * from moved', name
    ) using day;
    execute format(
        'alter table history attach partition %%I for values in (%%L)', name, day
    );
    return 'made';
end
$function$;

-- Temporary tables last, or a caller's own `history` would be taken for ours.
do $do$
begin
    execute format(
        'alter function make_history(date, int) set search_path = %%I, pg_temp',
        current_schema()
    );
end
$do$;
"""

UPGRADE = MAKE % (
    # Who writes waits here, before it has chosen a partition. A row that is on its way
    # to the default partition while its day is attached would be refused there, and its
    # job's completion with it.
    "lock table only history, history_default in share row exclusive mode;"
)

DOWNGRADE = MAKE % "lock table history_default in share row exclusive mode;"


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
