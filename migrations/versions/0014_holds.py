"""Rows that Kafka refuses are held, with the later ones of their key; all others flow.

Locks: none that anybody waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0014_holds"
down_revision = "0013_capture"
branch_labels = None
depends_on = None

UPGRADE = """
create table holds (
    topic text collate "C" not null,
    -- Whose rows wait: those of a key; or one row without a key, by its id; with
    -- neither, those of the whole topic.
    key text collate "C",
    row_id bigint,
    error text not null,
    attempts int not null default 1,
    since timestamptz not null default clock_timestamp(),
    -- When the first of its rows is tried again.
    retry_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
-- The table may be published: PostgreSQL refuses to update and delete published rows
-- that it cannot name to a replica, and these have no key to name them by.
alter table holds replica identity full;
-- There may be holds by the hundred thousand: each is found by an index.
create unique index holds_of on holds (topic, coalesce(key, ''), coalesce(row_id, 0));
-- For the holds whose time has come.
create index holds_due on holds (retry_at);
-- For those of whole topics, which are few.
create index holds_of_topics on holds (topic) where key is null and row_id is null;

-- Rows of the outbox that wait, as they were, out of the way of those that go.
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

-- Whether a row is one of those that a hold keeps back. Its names and operators are
-- bound when it is made, so it needs no search_path of its own: with one, it could not
-- be inlined.
create function is_held_by(hold holds, topic text, key text, id bigint)
returns boolean language sql immutable parallel safe
return hold.topic = topic and case
    when hold.key is not null then coalesce(hold.key = key, false)
    else hold.row_id is null or hold.row_id = id
end;

-- Lets go what a hold keeps, except for what others keep, and returns how many rows.
-- Each statement sees what was committed until then. So the rows that a relay has set
-- aside while this call waited for it are let go, too.
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
