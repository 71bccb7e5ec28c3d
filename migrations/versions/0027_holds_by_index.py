"""Holds by the hundred thousand: each is found by an index.

Locks: `holds` against writers while two indexes are made; relays write there only when
Kafka refuses a row.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- For the holds whose time has come.
create index holds_due on holds (retry_at);
-- For those of whole topics, which are few.
create index holds_of_topics on holds (topic) where key is null and row_id is null;

-- Lets go what a hold keeps, except for what others keep, and returns how many rows.
-- Each statement sees what was committed until then: rows that a relay has set aside
-- while this waited for it are let go, too.
create or replace function lift_hold(topic text, key text, row_id bigint)
returns bigint language plpgsql as $function$
declare
    kept bigint[];
    freed bigint;
begin
    -- By the expressions of the index.
    delete from holds h
    where h.topic = lift_hold.topic
        and coalesce(h.key, '') = coalesce(lift_hold.key, '')
        and coalesce(h.row_id, 0) = coalesce(lift_hold.row_id, 0);
    if lift_hold.key is not null then
        kept := array(
            select r.id from held_rows r
            where r.topic = lift_hold.topic and r.key = lift_hold.key
        );
    elsif lift_hold.row_id is not null then
        kept := array[lift_hold.row_id];
    else
        kept := array(select r.id from held_rows r where r.topic = lift_hold.topic);
    end if;
    with gone as (
        delete from held_rows r
        where r.id = any (kept) and r.topic = lift_hold.topic
            and not exists (
                select from holds h
                where h.topic = r.topic
                    and coalesce(h.key, '') = coalesce(r.key, '')
                    and coalesce(h.row_id, 0)
                        = case when r.key is null then r.id else 0 end
                offset 0
            )
            and not exists (
                select from holds h
                where h.topic = r.topic and h.key is null and h.row_id is null
                offset 0
            )
        returning *
    )
    insert into outbox (
        shard, class, id, topic, key, value, headers, entity, version, cause,
        reexport_id, created_at
    )
    select g.shard, g.class, g.id, g.topic, g.key, g.value, g.headers, g.entity,
        g.version, g.cause, g.reexport_id, g.created_at
    from gone g;
    get diagnostics freed = row_count;
    return freed;
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("drop index holds_due, holds_of_topics")
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    earlier = here.get_revision("0013").module.UPGRADE
    lift = earlier[earlier.index("create function lift_hold") :]
    lift = lift[: lift.index("$function$;") + len("$function$;")]
    op.execute(lift.replace("create function", "create or replace function"))
