"""Enqueue in SQL: for triggers, other languages, and Python's own path.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0008_enqueue"
down_revision = "0007_ordering"
branch_labels = None
depends_on = None

UPGRADE = """
-- Refuses values that Python cannot read: more than 200 levels, and integers of more
-- than 4,300 digits. jobs_lib.schemas.json_limits has the same limits.
create function check_json(what text, value jsonb, size int) returns void
language plpgsql immutable as $function$
declare
    there int := 200;
    missing int := size;
    middle int;
    digits int;
begin
    -- The fixed path first: the server keeps it, and it costs 2 ms for a megabyte.
    if jsonb_path_exists(
        value, 'strict $.**{200} ? (@.type() == "array" || @.type() == "object")'
    ) then
        while there + 1 < missing loop
            middle := (there + missing) / 2;
            if jsonb_path_exists(value, format(
                'strict $.**{%s} ? (@.type() == "array" || @.type() == "object")',
                middle
            )::jsonpath) then
                there := middle;
            else
                missing := middle;
            end if;
        end loop;
        raise exception '% has % levels, and at most 200 can be read again',
            what, there + 1
            using errcode = 'invalid_parameter_value',
                hint = 'Send what lies deep as a string of JSON, or as a flat list.';
    end if;
    if size > 4300 then
        digits := length(split_part(ltrim(jsonb_path_query_first(
            value, 'strict $.** ? (@.type() == "number"
                && (@ >= 1e4300 || @ <= -1e4300))'
        ) #>> '{}', '-'), '.', 1));
        if digits > 4300 then
            raise exception
                '% holds a number of % digits, and at most 4300 can be read again',
                what, digits
                using errcode = 'invalid_parameter_value', hint = 'Send a string.';
        end if;
    end if;
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

-- For triggers and other languages. This function does not know which record is being
-- handled: without group and origin the job goes to any partition of the home topic.
create function enqueue(
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
) returns bigint language plpgsql as $function$
#variable_conflict use_variable
declare
    home topics;
    counted int;
    size int := octet_length(payload::text);
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
    if size > 1048576 then
        raise exception 'the payload of % has % bytes, the limit is 1048576', type, size
            using errcode = 'invalid_parameter_value',
                hint = 'Store it elsewhere and enqueue where it lies.';
    end if;
    -- A shorter one has room for no more than 200 levels.
    if size > 400 then
        perform check_json('the payload of ' || type, payload, size);
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
drop function enqueue, insert_job, check_json;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
