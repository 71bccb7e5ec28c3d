"""Functions find no temporary table in the place of ours.

The run of the migrations itself sets `search_path` for every function, and takes
EXECUTE from PUBLIC where a function runs with its owner's rights: see `env.py`.

Locks: none that anybody waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- Its names and operators are bound here, so it needs no search_path of its own, with
-- which it could not be inlined.
create or replace function is_held_by(hold holds, topic text, key text, id bigint)
returns boolean language sql immutable parallel safe
return hold.topic = topic and case
    when hold.key is not null then coalesce(hold.key = key, false)
    else hold.row_id is null or hold.row_id = id
end;

-- Gives a day's rows back to the disk; only readers of the history may have to wait.
-- The schema is named: a temporary table would be found where ours is gone, and its
-- triggers would run with the rights of this function's owner.
create or replace function empty_history(day date) returns void
language plpgsql security definer as $function$
begin
    if day >= (clock_timestamp() at time zone 'UTC')::date then
        raise exception 'the history of % is still to be kept', day;
    end if;
    execute format(
        'truncate table %I.%I', current_schema(), 'history_' || to_char(day, 'YYYYMMDD')
    );
end
$function$;

-- Drops the partition of a day, empty by then. This locks the whole history for an
-- instant, so the caller sets a short lock_timeout and tries again.
create or replace function drop_history(day date) returns void
language plpgsql security definer as $function$
begin
    if day >= (clock_timestamp() at time zone 'UTC')::date then
        raise exception 'the history of % is still to be kept', day;
    end if;
    execute format(
        'drop table %I.%I', current_schema(), 'history_' || to_char(day, 'YYYYMMDD')
    );
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    """Nothing: the release before works with the functions as they are."""
