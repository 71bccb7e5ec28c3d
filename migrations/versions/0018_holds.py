"""Hold rows that Kafka refuses, and the later rows of their key; send all others.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0018_holds"
down_revision = "0017_capture"
branch_labels = None
depends_on = None

UPGRADE = """
create table holds (
    topic text collate "C" not null,
    -- With a key, all rows of the key wait. With a row_id, one row without a key waits.
    -- With neither, the whole topic waits.
    key text collate "C",
    row_id bigint,
    error text not null,
    attempts int not null default 1,
    since timestamptz not null default clock_timestamp(),
    -- When the relay tries the first of its rows again.
    retry_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
-- A publication may contain this table. PostgreSQL refuses to update and delete
-- published rows that it cannot identify to a replica, and these have no key.
alter table holds replica identity full;
-- There may be hundreds of thousands of holds: an index finds each of them.
create unique index holds_of on holds (topic, coalesce(key, ''), coalesce(row_id, 0));
-- Finds the holds that are due.
create index holds_due on holds (retry_at);
-- Finds the holds of whole topics, which are few.
create index holds_of_topics on holds (topic) where key is null and row_id is null;

-- Rows of the outbox that wait. They lie here unchanged, so that the relay does not
-- read past them.
create table held_rows (
    shard smallint not null,
    class smallint not null,
    id bigint primary key,
    topic text collate "C" not null,
    key text collate "C",
    value bytea,
    headers jsonb,
    entity text collate "C",
    version bigint,
    cause text collate "C" not null,
    reexport_id bigint,
    created_at timestamptz not null
);
create index held_rows_of_key on held_rows (topic, key, id);

-- Whether a hold keeps a row back. The names and operators of this function are bound
-- when it is made, so it needs no search_path of its own. With one, PostgreSQL could
-- not inline it.
create function is_held_by(hold holds, topic text, key text, id bigint)
returns boolean language sql immutable parallel safe
return hold.topic = topic and case
    when hold.key is not null then coalesce(hold.key = key, false)
    else hold.row_id is null or hold.row_id = id
end;

-- Releases the rows of a hold, except rows that other holds keep, and returns how many.
-- Each statement sees all that was committed before it. So the function also releases
-- rows that a relay has set aside while this call waited for the relay.
create function lift_hold(topic text, key text, row_id bigint)
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

DOWNGRADE = """
select lift_hold(topic, key, row_id) from holds;
drop function lift_hold, is_held_by;
drop table held_rows, holds;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
