"""A home topic whose number of partitions changes while jobs are enqueued.

Locks: none that anybody waits for; only functions are made.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# A temporary table that the session calls `jobs` must not be taken for ours.
SEARCH_PATH = """
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true)
"""

UPGRADE = """
-- In which of so many partitions a group lives.
create function place_group("group" text, partitions int) returns bigint
language sql immutable strict parallel safe set search_path from current as $function$
    select (murmur2(convert_to("group", 'UTF8')) & 2147483647) % partitions
$function$;

-- The number of the home topic's partitions, which stays as it is until the transaction
-- ends: whoever changes it holds this lock alone.
create function hold_home() returns int
language plpgsql set search_path from current as $function$
declare
    there int;
begin
    perform pg_advisory_xact_lock_shared(hashtextextended('home', 7603));
    if current_setting('transaction_isolation') = 'read committed' then
        select t.partitions into there from topics t where t.home;
    else
        -- A snapshot from before the change would show the old number: an error.
        select t.partitions into there from topics t where t.home for share;
    end if;
    return there;
end
$function$;

-- Inserts one job whose values were checked by the caller, and returns its id, or that
-- of the unfinished job of its type that has the same unique key.
create function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean,
    -- What executors are told, if the job may run now; null for nothing.
    hint text,
    -- Of the home topic, as the group's origin was computed; null if it was given.
    partitions int
) returns bigint language plpgsql set search_path from current as $function$
#variable_conflict use_column
declare
    new_id bigint;
    -- A time that has come is no delay: the claim's cursor then finds the row.
    new_state text := case
        when insert_job.run_at > clock_timestamp() then 'scheduled' else 'available'
    end;
    now_there int;
begin
    if insert_job."group" is not null then
        now_there := hold_home();
        if now_there <> insert_job.partitions then
            insert_job.origin := split_part(insert_job.origin, '/', 1) || '/'
                || place_group(insert_job."group", now_there);
        end if;
    end if;
    if insert_job.ordered and insert_job."group" is not null then
        -- A statement of its own: the id is drawn after it, so the ids of a group rise
        -- in the order in which their transactions commit.
        perform pg_advisory_xact_lock_shared(hashtextextended(insert_job.origin, 7601)),
            pg_advisory_xact_lock(hashtextextended(insert_job."group", 7602));
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

-- For releases that do not say how they have computed the origin.
create or replace function insert_job(
    origin text, type text, "group" text, payload jsonb, run_at timestamptz,
    priority smallint, headers jsonb, unique_key text, ordered boolean, hint text
) returns bigint language sql set search_path from current as $function$
    select insert_job(
        origin, type, "group", payload, run_at, priority, headers, unique_key, ordered,
        hint, null
    )
$function$;

-- For triggers and other languages. The record that is being handled is unknown here:
-- without group and origin the job goes to any partition of the home topic.
create or replace function enqueue(
    type text,
    payload jsonb default '{}',
    "group" text default null,
    run_at timestamptz default null,
    priority text default 'normal',
    unique_key text default null,
    origin text default null,
    headers jsonb default null,
    ordered boolean default true,
    notify boolean default true
) returns bigint language plpgsql set search_path from current as $function$
#variable_conflict use_variable
declare
    home topics;
    counted int;
    level smallint := case priority when 'high' then 1 when 'normal' then 0
        when 'batch' then -1 end;
begin
    if type is null or type !~ '^[A-Za-z_][A-Za-z0-9_.:-]{0,199}$' then
        raise exception '% is no name for a job type', quote_nullable(type)
            using errcode = 'invalid_parameter_value', hint = 'Give the name that '
                'the application declares: letters, digits and _ . : - only.';
    end if;
    if payload is null or jsonb_typeof(payload) <> 'object' then
        raise exception 'the payload of % is no JSON object', type
            using errcode = 'invalid_parameter_value', hint = 'Give the handler''s '
                'arguments by name, as in ''{"order": 7}''.';
    end if;
    if octet_length(payload::text) > 1048576 then
        raise exception 'the payload of % has % bytes, the limit is 1048576',
            type, octet_length(payload::text)
            using errcode = 'invalid_parameter_value',
                hint = 'Store it elsewhere and enqueue where it lies.';
    end if;
    if octet_length("group") not between 1 and 1000 then
        raise exception 'the group of % has % bytes, 1 to 1000 are allowed',
            type, octet_length("group")
            using errcode = 'invalid_parameter_value', hint = 'Null means no group.';
    end if;
    if octet_length(unique_key) not between 1 and 1000 then
        raise exception 'the unique key of % has % bytes, 1 to 1000 are allowed',
            type, octet_length(unique_key)
            using errcode = 'invalid_parameter_value',
                hint = 'Null means that the job is not unique.';
    end if;
    if not (run_at >= '2000-01-01Z' and run_at < '9999-12-31Z') then
        raise exception 'run_at of % is %, and must lie in the years 2000 to 9999',
            type, run_at
            using errcode = 'invalid_parameter_value', hint = 'Null means now.';
    end if;
    if level is null then
        raise exception '% is no priority', quote_nullable(priority)
            using errcode = 'invalid_parameter_value',
                hint = 'Give high, normal or batch.';
    end if;
    if jsonb_typeof(headers) <> 'object' or jsonb_path_exists(
        headers, 'lax $.keyvalue() ? (@.value.type() <> "string")'
    ) or octet_length(headers::text) > 8192 then
        raise exception 'the headers of % are no object of strings of up to 8192 bytes',
            type
            using errcode = 'invalid_parameter_value',
                hint = 'Give them as in ''{"tenant": "acme"}''.';
    end if;
    if origin is null then
        select * into home from topics t where t.home;
        if not found then
            raise exception 'no home topic is declared' using
                errcode = 'object_not_in_prerequisite_state', hint =
                'Run `jobs-lib topics declare TOPIC --partitions N --home`.';
        end if;
        counted := home.partitions;
        origin := home.topic || '/' || case
            when "group" is null then floor(random() * home.partitions)::bigint
            else place_group("group", home.partitions)
        end;
    elsif origin !~ '^[a-zA-Z0-9._-]+/[0-9]{1,9}$' or not exists (
        select from topics t where t.topic = split_part(origin, '/', 1)
    ) then
        raise exception 'no topic is declared for the origin %', quote_literal(origin)
            using errcode = 'invalid_parameter_value',
                hint = 'Give topic/partition with one of the declared topics.';
    end if;
    return insert_job(
        origin, type, "group", payload, run_at, level, headers, unique_key, ordered,
        case when notify then origin end, counted
    );
end
$function$;
"""

DOWNGRADE = """
drop function hold_home, place_group, insert_job(
    text, text, text, jsonb, timestamptz, smallint, jsonb, text, boolean, text, int
);
"""


def upgrade() -> None:
    op.execute(SEARCH_PATH)
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    earlier = here.get_revision("0006").module
    earlier.downgrade()
    earlier.upgrade()
