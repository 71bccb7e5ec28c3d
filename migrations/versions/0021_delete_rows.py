"""Sent rows of the outbox are deleted by a function, which counts them at no cost.

Locks: none that anybody waits for; only a function is made.
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- Deletes rows that Kafka has acknowledged, if the shard is still the owner's, and says
-- how many. A statement that counts them has to return them: the server would fetch,
-- copy and keep each row once more.
create function delete_rows(
    shard int, owner uuid, epoch bigint, places tid[], ids bigint[]
) returns bigint language plpgsql set search_path from current as $function$
declare
    gone bigint;
    moved bigint;
begin
    -- A take-over waits until this has ended.
    perform from origins f
    where f.role = 'relay' and f.origin = 'shard/' || delete_rows.shard
        and f.owner = delete_rows.owner and f.epoch = delete_rows.epoch
    for share;
    if not found then
        return 0;
    end if;
    -- Where they were read: no look into the index for each. Something may have moved
    -- the rows since, such as VACUUM FULL, and another may lie there; hence the id, in
    -- a form that is hashed whatever the statistics say.
    delete from outbox o
    where o.ctid = any (places) and (o.id in (select unnest(ids))) is true;
    get diagnostics gone = row_count;
    if gone < cardinality(ids) then
        -- All or none: an older row of a key that stays would be sent after a newer.
        delete from outbox where ctid = any (array(
            select row.ctid
            from unnest(ids) as d(id)
            -- No constant, or a table that seems empty is read by its keys' index.
            cross join unnest(array[0]) as c(class)
            cross join lateral (
                select o.ctid from outbox o
                where o.shard = delete_rows.shard and o.class = c.class and o.id = d.id
                offset 0
            ) row
        ));
        get diagnostics moved = row_count;
    end if;
    return gone + coalesce(moved, 0);
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("drop function delete_rows")
