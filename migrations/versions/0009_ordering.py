"""Locks that make the ids of a group, or of a key, rise in the order of the commits.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0009_ordering"
down_revision = "0008_placement"
branch_labels = None
depends_on = None

UPGRADE = """
-- Orders the ids of a group, or of a key, by the commits of their transactions. It
-- takes a lock for each (`fine`), beside a shared one for its origin or shard
-- (`coarse`). The server has room for some thousand locks, which all its sessions
-- share. So a transaction that holds 500 locks takes whole origins or shards instead:
-- it takes one alone if no other session holds it now. From 2,000 locks on it waits for
-- that. The fine lock comes first. While a session waits for a fine lock, it holds no
-- coarse one, so the session that it waits for can take a coarse lock alone.
create function lock_in_order(coarse bigint, fine bigint) returns void
language plpgsql as $function$
declare
    -- Above zero: locks that may be taken until they are counted again. From zero down:
    -- fine locks taken since 500 were counted. A savepoint gives back locks and number.
    room int := coalesce(
        nullif(current_setting('jobs_lib.lock_room', true), '')::int, 500
    );
begin
    if room = 1 then
        -- A group that was locked before costs nothing; hence the count.
        select greatest(500 - count(*), 0) into room from pg_locks l
        where l.pid = pg_backend_pid() and l.locktype = 'advisory';
        room := case when room > 0 then greatest(room, 100) else 0 end;
        perform set_config('jobs_lib.lock_room', room::text, true);
    end if;
    if room <= 0 then
        if pg_try_advisory_xact_lock(coarse) then
            return;
        elsif room <= -1500 then
            perform pg_advisory_xact_lock(coarse);
            return;
        end if;
    end if;
    perform set_config('jobs_lib.lock_room', (room - 1)::text, true),
        pg_advisory_xact_lock(fine), pg_advisory_xact_lock_shared(coarse);
end
$function$;

-- Does the same as `lock_in_order` for many pairs of (coarse, fine). It takes all fine
-- locks before the first shared coarse one. While a bulk call waits for a group, or a
-- key, it holds no coarse lock. So the large transaction that it waits for can take any
-- of them alone. It takes each kind in the order of the values, so two bulk calls never
-- wait in a circle.
create function lock_all_in_order(coarse bigint[], fine bigint[]) returns void
language plpgsql as $function$
#variable_conflict use_variable
declare
    -- As in `lock_in_order`.
    room int := coalesce(
        nullif(current_setting('jobs_lib.lock_room', true), '')::int, 500
    );
    -- Whose fine locks are taken, and not the coarse one alone.
    shared bigint[] := '{}';
    pair record;
begin
    for pair in
        select distinct p.coarse, p.fine from unnest(coarse, fine) as p(coarse, fine)
        order by p.fine, p.coarse
    loop
        if room = 1 then
            select greatest(500 - count(*), 0) into room from pg_locks l
            where l.pid = pg_backend_pid() and l.locktype = 'advisory';
            room := case when room > 0 then greatest(room, 100) else 0 end;
        end if;
        if room <= 0 then
            if pg_try_advisory_xact_lock(pair.coarse) then
                continue;
            elsif room <= -1500 then
                perform pg_advisory_xact_lock(pair.coarse);
                continue;
            end if;
        end if;
        room := room - 1;
        perform pg_advisory_xact_lock(pair.fine);
        shared := shared || pair.coarse;
    end loop;
    perform set_config('jobs_lib.lock_room', room::text, true);
    perform pg_advisory_xact_lock_shared(s.key)
    from (select distinct u.key from unnest(shared) as u(key) order by u.key) s;
end
$function$;
"""

DOWNGRADE = """
drop function lock_all_in_order, lock_in_order;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
