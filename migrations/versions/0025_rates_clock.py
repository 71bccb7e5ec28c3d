"""Rates go on at once when the server's clock is set back.

Locks: none that anybody waits for; only a function is made.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

UPGRADE = """
create or replace function take_starts(
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
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    earlier = here.get_revision("0009").module.UPGRADE
    begin = earlier.index("create function take_starts")
    op.execute(earlier[begin:].replace("create function", "create or replace function"))
