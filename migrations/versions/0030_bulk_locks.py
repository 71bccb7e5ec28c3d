"""A bulk call waits for its groups or keys before it locks an origin or shard.

Locks: none that anybody waits for; only a function is made. Bulk calls of an older
release still lock their origins first.
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- What `lock_in_order` does, for many pairs of (coarse, fine). All fine locks come
-- before the first shared coarse one: a bulk call that waits for a group, or a key,
-- holds no coarse lock. So the large transaction that it waits for can take any of them
-- alone. Each kind is taken in the order of its values: two bulk calls never wait in a
-- circle.
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


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("drop function lock_all_in_order")
