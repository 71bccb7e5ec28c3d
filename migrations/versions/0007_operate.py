"""What operators need: the types of a process, the days of the history, look-ups by id.

Locks: `processes` exclusively for an instant; `history_default` against writes while
its rows are indexed, and it holds none on a usual day.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UPGRADE = """
-- The job types that the process has handlers for; null: a release that did not say.
alter table processes add column types text[];

-- Ids rise nearly in the order of finishing, so a summary per block range finds one in
-- a day of millions, and an insert pays next to nothing for it. Several ranges of
-- values each: a job that was retried for long lands among much younger ones.
create index history_of_id on history using brin (id int8_minmax_multi_ops)
    with (autosummarize = on);

-- The origins that have jobs, by one look into the primary key for each.
create function job_origins() returns setof text
language sql stable set search_path from current as $function$
    with recursive found (origin) as (
        (select j.origin from jobs j order by j.origin limit 1)
        union all
        select (
            select j.origin from jobs j where j.origin > f.origin
            order by j.origin limit 1
        )
        from found f where f.origin is not null
    )
    select origin from found where origin is not null
$function$;

-- Where unfinished jobs are. No index starts with the id, so every origin is asked.
create function find_jobs(wanted bigint[])
returns table (origin text, id bigint)
language sql stable set search_path from current as $function$
    select o.origin, found.id from job_origins() as o(origin)
    cross join unnest(wanted) as w(id)
    cross join lateral (
        -- Not `= any (wanted)`: an empty array would let the planner take any index.
        select j.id from jobs j where j.origin = o.origin and j.id = w.id offset 0
    ) found
$function$;

-- The partitions of the history are made and dropped by whoever runs a service, whose
-- role need not own the tables: these run with the rights of who migrated, and do
-- nothing but what is due anyway.

-- Makes the partition of a day, and moves there what the default partition holds of it.
-- With more than `most` rows it does not: moving them would hold up the completions
-- that land there. Attaching does not block the writers of other days; `create table …
-- partition of` would.
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
    lock table history_default in share row exclusive mode;
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

-- Gives a day's rows back to the disk; only readers of the history may have to wait.
create function empty_history(day date) returns void
language plpgsql security definer as $function$
begin
    if day >= (clock_timestamp() at time zone 'UTC')::date then
        raise exception 'the history of % is still to be kept', day;
    end if;
    execute format('truncate table %I', 'history_' || to_char(day, 'YYYYMMDD'));
end
$function$;

-- Drops the partition of a day, empty by then. This locks the whole history for an
-- instant, so the caller sets a short lock_timeout and tries again.
create function drop_history(day date) returns void
language plpgsql security definer as $function$
begin
    if day >= (clock_timestamp() at time zone 'UTC')::date then
        raise exception 'the history of % is still to be kept', day;
    end if;
    execute format('drop table %I', 'history_' || to_char(day, 'YYYYMMDD'));
end
$function$;

-- Temporary tables last, or a caller's own `history` would be taken for ours.
do $do$
declare
    one text;
begin
    foreach one in array array[
        'make_history(date, int)', 'empty_history(date)', 'drop_history(date)'
    ] loop
        execute format(
            'alter function %s set search_path = %I, pg_temp', one, current_schema()
        );
    end loop;
end
$do$;
"""

DOWNGRADE = """
drop function drop_history, empty_history, make_history, find_jobs, job_origins;
drop index history_of_id;
alter table processes drop column types;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
