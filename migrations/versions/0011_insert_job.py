"""Insert one job, with its place, its id in order, and its unique key.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0011_insert_job"
down_revision = "0010_json_limits"
branch_labels = None
depends_on = None

UPGRADE = """
-- Inserts one job. The caller has checked its values. The function returns the job's
-- id, or that of the unfinished job of its type that has the same unique key.
create function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean,
    -- The hint for executors if the job may run now; null for none.
    hint text,
    -- The number by which the group's origin was computed; null if it was given.
    partitions int,
    -- The place that it gets: 'record <source> <offset>' of the record that is handled,
    -- or those of the jobs that `places_of` is given; null for that of the transaction.
    place text
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
    new_source int;
    new_offset bigint;
    -- All places, where there is more than one, of as many partitions.
    sources int[];
    offsets bigint[];
begin
    if insert_job.place is null then
        insert_job.place := nullif(current_setting('jobs_lib.place', true), '');
        if insert_job.place is not null then
            -- So the consumer knows that its handler enqueues in SQL.
            perform set_config('jobs_lib.place_used', 'yes', true);
        end if;
    end if;
    if insert_job.place like 'record %' then
        new_source := split_part(insert_job.place, ' ', 2);
        new_offset := split_part(insert_job.place, ' ', 3);
    elsif insert_job.place is not null then
        select array_agg(p.source), array_agg(p.record_offset) into sources, offsets
        from places_of(insert_job.place) p;
        new_source := sources[1];
        new_offset := offsets[1];
    end if;
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
            (origin, type, "group", state, payload, run_at, priority, headers, source,
             record_offset)
        values
            (insert_job.origin, insert_job.type, insert_job."group", new_state,
             insert_job.payload, insert_job.run_at, insert_job.priority,
             insert_job.headers, new_source, new_offset)
        returning id into new_id;
    else
        loop
            -- Waits for an open transaction that holds the key: if it rolls back, the
            -- job is inserted here.
            insert into jobs
                (origin, type, "group", state, payload, run_at, priority, headers,
                 unique_key, source, record_offset)
            values
                (insert_job.origin, insert_job.type, insert_job."group", new_state,
                 insert_job.payload, insert_job.run_at, insert_job.priority,
                 insert_job.headers, insert_job.unique_key, new_source, new_offset)
            on conflict (type, unique_key) where unique_key is not null do nothing
            returning id into new_id;
            exit when found;
            select j.id into new_id from jobs j
            where j.type = insert_job.type and j.unique_key = insert_job.unique_key;
            if found then
                if new_source is not null then
                    perform keep_place(j.id, j.origin, p.source, p.record_offset)
                    from jobs j
                    cross join unnest(
                        coalesce(sources, array[new_source]),
                        coalesce(offsets, array[new_offset])
                    ) as p(source, record_offset)
                    where j.type = insert_job.type
                        and j.unique_key = insert_job.unique_key;
                end if;
                return new_id;
            end if;
            -- It was finished between the two statements: the key is free again.
        end loop;
    end if;
    if cardinality(sources) > 1 then
        perform keep_place(new_id, insert_job.origin, p.source, p.record_offset)
        from unnest(sources[2:], offsets[2:]) as p(source, record_offset);
    end if;
    if insert_job.hint is not null and new_state = 'available' then
        perform pg_notify(channel(), insert_job.hint);
    end if;
    return new_id;
end
$function$;

-- The same with the places of the transaction, for `enqueue`.
create function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean, hint text,
    partitions int
) returns bigint language plpgsql as $function$
begin
    return insert_job(
        origin, type, "group", payload, run_at, priority, headers, unique_key, ordered,
        hint, partitions, null::text
    );
end
$function$;
"""

DOWNGRADE = """
drop function insert_job(
    text, text, text, jsonb, timestamptz, smallint, jsonb, text, boolean, text, int
);
drop function insert_job(
    text, text, text, jsonb, timestamptz, smallint, jsonb, text, boolean, text, int,
    text
);
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
