"""Enqueue in SQL: for triggers, and other languages.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0012_enqueue"
down_revision = "0011_insert_job"
branch_labels = None
depends_on = None

UPGRADE = """
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
                'Run `jobs-lib topics declare MODULE:APP TOPIC --partitions N --home`.';
        end if;
        counted := home.partitions;
        origin := home.topic || '/' || case
            when "group" is null then floor(random() * home.partitions)::bigint
            else place_group("group", home.partitions)
        end;
    -- Nobody would own orders/007: Kafka has no partition of that name.
    elsif origin !~ '^[a-zA-Z0-9._-]+/(0|[1-9][0-9]{0,8})$' or not exists (
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
drop function enqueue;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
