"""Limits of rate for job types, one bucket each for all pods.

Locks: none that anybody waits for; the table is new.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

UPGRADE = """
create table rates (
    type text collate "C" primary key,
    -- Starts that may be taken now, as of `refilled_at`.
    tokens double precision not null,
    refilled_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

-- Takes up to `wanted` starts of a type; where there is none, says in how many seconds
-- there will be one. What the bucket holds at the most is the longest burst.
create function take_starts(
    type text, per_second double precision, capacity double precision, wanted int,
    out granted int, out seconds double precision
)
language plpgsql set search_path from current as $function$
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
    filled := least(
        capacity,
        -- A clock that was set back must not take starts away.
        bucket.tokens + per_second * greatest(
            0, extract(epoch from at - bucket.refilled_at)::double precision
        )
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
"""

DOWNGRADE = """
drop function take_starts;
drop table rates;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
