"""The history of finished jobs, in partitions by the day until which they are kept.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0006_history"
down_revision = "0005_places"
branch_labels = None
depends_on = None

UPGRADE = """
-- A finished job lies in the partition of the last day, by UTC, on which it is kept.
-- Jobs that are kept for different times share no partition, so each is dropped whole.
create table history (
    keep_until date not null,
    finished_at timestamptz not null default clock_timestamp(),
    id bigint not null,
    origin text collate "C" not null,
    type text collate "C" not null,
    "group" text collate "C",
    outcome text collate "C" not null
        check (outcome in ('completed', 'discarded', 'cancelled', 'superseded')),
    attempt int not null,
    enqueued_at timestamptz not null
) partition by list (keep_until);

-- No completion may fail because the partition of its day has not been made.
create table history_default partition of history default;
-- The rows of the default partition are moved, and a publication may contain it.
-- PostgreSQL refuses to delete published rows that it cannot identify to a replica, and
-- these have no key.
alter table history_default replica identity full;

-- Ids rise nearly in the order in which jobs finish. So a summary for each range of
-- blocks finds one job in a day of millions, and costs an insert almost nothing. A
-- summary holds several ranges of ids, since a job that was retried for a long time
-- lands among much younger ones.
create index history_of_id on history using brin (id int8_minmax_multi_ops)
    with (autosummarize = on);

-- Every service makes and drops partitions of the history, and its role may not own the
-- tables. So the three functions below run with the rights of the tables' owner, and do
-- only what is due.

-- Makes the partition of a day, and moves the rows of that day out of the default
-- partition. If these are more than `most`, it does nothing: to move them would delay
-- the completions that land there.
-- To attach a partition does not block writers of other days, as `create table …
-- partition of` would. But all writers wait at the lock of the history, before they
-- have chosen a partition. Otherwise the day could be attached while a row is on its
-- way to the default partition. The default partition would refuse the row, and with it
-- the completion of its job.
create function make_history(day date, most int) returns text
language plpgsql security definer as $function$
declare
    name text := 'history_' || to_char(day, 'YYYYMMDD');
    today date := (clock_timestamp() at time zone 'UTC')::date;
begin
    if day < today or day > today + 3661 then
        raise exception 'the history has no partition for %', day;
    end if;
    if to_regclass(format('%I.%I', current_schema(), name)) is not null then
        return 'there';
    end if;
    lock table only history, history_default in share row exclusive mode;
    if (
        select count(*) from (
            select from history_default d where d.keep_until = day limit most + 1
        ) rows
    ) > most then
        return 'crowded';
    end if;
    execute format('create table %I (like history including all)', name);
    execute format(
        'with moved as (delete from history_default where keep_until = $1 returning *)'
        ' insert into %I select * from moved', name
    ) using day;
    execute format(
        'alter table history attach partition %I for values in (%L)', name, day
    );
    return 'made';
end
$function$;

-- Returns the space of a day's rows to the disk; only readers of the history may have
-- to wait. The statement names the schema. Without it, if our table is gone, PostgreSQL
-- would find a temporary table, and its triggers would run with the rights of the owner
-- of this function.
create function empty_history(day date) returns void
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

-- Drops the partition of a day, which is already empty. This locks the whole history
-- for an instant, so the caller sets a short lock_timeout and tries again.
create function drop_history(day date) returns void
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

DOWNGRADE = """
drop function drop_history, empty_history, make_history;
drop table history;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
