"""Limits of job types: how many start within a time, and how many run at once.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0014_limits"
down_revision = "0013_pauses"
branch_labels = None
depends_on = None

UPGRADE = """
-- Rate limits of job types: each has one bucket, for all pods.
create table rates (
    type text collate "C" primary key,
    -- Starts that may be taken now, as of `refilled_at`.
    tokens double precision not null,
    refilled_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

-- Takes up to `wanted` starts of a type. If there is none, it returns in how many
-- seconds there will be one. The bucket's capacity is the longest burst.
create function take_starts(
    type text, per_second double precision, capacity double precision, wanted int,
    out granted int, out seconds double precision
)
language plpgsql as $function$
declare
    bucket rates;
    filled double precision;
    at timestamptz;
begin
    -- What a crash of the server forgets is not worth a wait for the disk.
    perform set_config('synchronous_commit', 'off', true);
    select * into bucket from rates r where r.type = take_starts.type for update;
    if not found then
        insert into rates (type, tokens) values (take_starts.type, capacity)
        on conflict do nothing;
        select * into bucket from rates r where r.type = take_starts.type for update;
    end if;
    at := clock_timestamp();
    if bucket.refilled_at > at then
        -- The clock was set back: nothing would be filled in until it is there again.
        update rates r set refilled_at = at where r.type = take_starts.type;
        bucket.refilled_at := at;
    end if;
    filled := least(
        capacity,
        bucket.tokens
            + per_second * extract(epoch from at - bucket.refilled_at)::double precision
    );
    granted := least(wanted, floor(filled));
    if granted > 0 then
        update rates r set tokens = filled - granted, refilled_at = at
        where r.type = take_starts.type;
        seconds := 0;
    else
        seconds := (1 - filled) / per_second;
    end if;
end
$function$;

-- Limits how many jobs of a type run at once, over all processes. There is a row for
-- each job that may run: of the whole type, or of each value.
create table slots (
    type text collate "C" not null,
    -- The value of the limit's parameter; empty if the limit counts the whole type.
    value text collate "C" not null,
    slot int not null check (slot > 0),
    owner uuid not null,
    -- Whether a process waits that has no slot, or fewer slots than the owner.
    wanted boolean not null default false,
    taken_at timestamptz not null default clock_timestamp(),
    primary key (type, value, slot)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
create index slots_wanted on slots (owner, type) where wanted;
create index slots_owner on slots (owner, type);
"""

DOWNGRADE = """
drop function take_starts;
drop table slots, rates;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
