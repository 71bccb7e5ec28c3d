"""The place of the record in whose handling a job was enqueued.

Locks: `jobs`, for as long as it takes to add two columns without a value, and to make
an index if the table's file is small. If it is not, the index is left out: a service
that needs it says by which statement it is made while everything runs.
"""

from __future__ import annotations

from alembic import op

revision = "0022_places"
down_revision = "0021_resync_shown"
branch_labels = None
depends_on = None

UPGRADE = """
-- Partitions whose consumer tells how far their jobs are done. A job names its
-- partition by this short number.
create table sources (
    id int generated always as identity primary key,
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    partition int not null,
    unique (consumer_group, topic, partition)
);

-- The place of the record in whose handling the job was enqueued, or the job that has
-- enqueued it, and so on. Null: no such record, or its consumer does not tell.
alter table jobs add column source int, add column record_offset bigint;

-- Finds the lowest place of a partition. All rows lack one now, but to see that, the
-- server must read the whole table, and no pod can write meanwhile. So this is only
-- done while the file is small, and takes some hundredths of a second.
do $small$
begin
    if pg_relation_size('jobs') < 67108864 then
        create index jobs_of_place on jobs (source, record_offset, id)
            where source is not null;
    end if;
end
$small$;

-- Places that a job has beside its own: of a job that it has superseded, of a record in
-- whose handling it was found by its unique key, and its own after it was discarded. A
-- row counts until its job is in none of `jobs` and `discarded`; then it is deleted. No
-- job's row is changed instead: its owner may be about to delete it.
create table kept_places (
    source int not null,
    record_offset bigint not null,
    job_id bigint not null,
    -- Of the job.
    origin text collate "C" not null
) with (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);
create index kept_places_of_source on kept_places (source, record_offset);
create index kept_places_of_job on kept_places (job_id);
-- Rows have no key, and a publication may contain the table.
alter table kept_places replica identity full;

-- The places of jobs whose handler enqueues another, one for each partition. They are
-- named as in 'job flights/3:4711', and a handler of a batch names several. It is
-- planned once: to plan it at each call takes longer than all the rest.
create function places_of(place text)
returns table (source int, record_offset bigint)
language plpgsql stable set plan_cache_mode = 'force_generic_plan' as $function$
#variable_conflict use_column
begin
    return query
    select p.source, min(p.record_offset)
    from unnest((string_to_array(place, ' '))[2:]) as h(holder)
    cross join lateral (
        -- `offset 0`: one index look-up each, whatever the statistics say.
        (
            select j.source, j.record_offset from jobs j
            where j.origin = split_part(h.holder, ':', 1)
                and j.id = split_part(h.holder, ':', 2)::bigint and j.source is not null
            offset 0
        )
        union all
        (
            select k.source, k.record_offset from kept_places k
            where k.job_id = split_part(h.holder, ':', 2)::bigint
            offset 0
        )
    ) p
    group by p.source
    order by p.source;
end
$function$;

-- Lets a job keep one more place, unless it has an earlier one of the same partition.
create function keep_place(
    job_id bigint, origin text, source int, record_offset bigint
) returns void language plpgsql as $function$
#variable_conflict use_column
begin
    insert into kept_places (source, record_offset, job_id, origin)
    select keep_place.source, keep_place.record_offset, keep_place.job_id,
        keep_place.origin
    where not exists (
        select from kept_places k
        where k.job_id = keep_place.job_id and k.source = keep_place.source
            and k.record_offset <= keep_place.record_offset
    ) and not exists (
        select from jobs j
        where j.origin = keep_place.origin and j.id = keep_place.job_id
            and j.source = keep_place.source
            and j.record_offset <= keep_place.record_offset
    );
end
$function$;

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

-- The same with the places of the transaction: for `enqueue`, and for pods of the
-- release before, which call it until they end.
create or replace function insert_job(
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
create or replace function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean,
    -- The hint for executors if the job may run now; null for none.
    hint text,
    -- The number by which the group's origin was computed; null if it was given.
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

drop function insert_job(
    text, text, text, jsonb, timestamptz, smallint, jsonb, text, boolean, text, int,
    text
);
drop function keep_place, places_of;
drop table kept_places;
-- Its index goes with them.
alter table jobs drop column source, drop column record_offset;
drop table sources;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
