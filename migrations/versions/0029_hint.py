"""A job that is placed anew as it is enqueued is hinted where it lies.

Locks: none that anybody waits for; only a function is made.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

UPGRADE = r"""
create or replace function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean,
    -- What executors are told, if the job may run now; null for nothing.
    hint text,
    -- Of the home topic, as the group's origin was computed; null if it was given.
    partitions int
) returns bigint language plpgsql as $function$
#variable_conflict use_column
declare
    new_id bigint;
    -- A time that has come is no delay: the claim's cursor then finds the row.
    new_state text := case
        when insert_job.run_at > clock_timestamp() then 'scheduled' else 'available'
    end;
    home topics;
    new_origin text;
begin
    if insert_job."group" is not null then
        home := hold_home_topic();
        -- The caller may know a home topic, or a number of partitions, of a minute ago.
        if home.partitions <> insert_job.partitions
            or insert_job.partitions is not null
                and home.topic <> split_part(insert_job.origin, '/', 1)
        then
            new_origin := home.topic || '/'
                || place_group(insert_job."group", home.partitions);
            -- Or nobody is told who has the job; a hint for all stays one.
            if insert_job.hint = insert_job.origin then
                insert_job.hint := new_origin;
            end if;
            insert_job.origin := new_origin;
        end if;
    end if;
    if insert_job.ordered and insert_job."group" is not null then
        -- A statement of its own: the id is drawn after it, so the ids of a group rise
        -- in the order in which their transactions commit.
        perform lock_in_order(
            hashtextextended(insert_job.origin, 7601),
            hashtextextended(insert_job."group", 7602)
        );
    end if;
    if insert_job.unique_key is null then
        insert into jobs
            (origin, type, "group", state, payload, run_at, priority, headers)
        values
            (insert_job.origin, insert_job.type, insert_job."group", new_state,
             insert_job.payload, insert_job.run_at, insert_job.priority,
             insert_job.headers)
        returning id into new_id;
    else
        loop
            -- Waits for an open transaction that holds the key: if it rolls back, the
            -- job is inserted here.
            insert into jobs
                (origin, type, "group", state, payload, run_at, priority, headers,
                 unique_key)
            values
                (insert_job.origin, insert_job.type, insert_job."group", new_state,
                 insert_job.payload, insert_job.run_at, insert_job.priority,
                 insert_job.headers, insert_job.unique_key)
            on conflict (type, unique_key) where unique_key is not null do nothing
            returning id into new_id;
            exit when found;
            select j.id into new_id from jobs j
            where j.type = insert_job.type and j.unique_key = insert_job.unique_key;
            if found then
                return new_id;
            end if;
            -- It was finished between the two statements: the key is free again.
        end loop;
    end if;
    if insert_job.hint is not null and new_state = 'available' then
        perform pg_notify(channel(), insert_job.hint);
    end if;
    return new_id;
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    earlier = here.get_revision("0023").module.UPGRADE
    insert = earlier[earlier.index("create or replace function insert_job(") :]
    op.execute(insert[: insert.index("$function$;") + len("$function$;")])
