"""Rows that Kafka refuses are held, with the later ones of their key; all others flow.

Locks: none that anybody waits for; the tables and functions are new.
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

UPGRADE = """
create table holds (
    topic text collate "C" not null,
    -- Its rows wait: of one key; of none, where a row without a key is meant; with
    -- neither, of the whole topic.
    key text collate "C",
    row_id bigint,
    error text not null,
    attempts int not null default 1,
    since timestamptz not null default clock_timestamp(),
    -- When the first of its rows is tried again.
    retry_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
create unique index holds_of on holds (topic, coalesce(key, ''), coalesce(row_id, 0));

-- Rows of the outbox that wait, out of the way of those that go: as they were.
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

-- Whether a row is one of those that a hold keeps back.
create function is_held_by(hold holds, topic text, key text, id bigint) returns boolean
language sql immutable parallel safe as $function$
    select hold.topic = topic and case
        when hold.key is not null then coalesce(hold.key = key, false)
        else hold.row_id is null or hold.row_id = id
    end
$function$;

-- Lets go what a hold keeps, except for what others keep, and returns how many rows.
-- Each statement sees what was committed until then: rows that a relay has set aside
-- while this waited for it are let go, too.
create function lift_hold(topic text, key text, row_id bigint) returns bigint
language plpgsql set search_path from current as $function$
declare
    lifted holds;
    freed bigint;
begin
    delete from holds h
    where h.topic = lift_hold.topic and h.key is not distinct from lift_hold.key
        and h.row_id is not distinct from lift_hold.row_id
    returning * into lifted;
    with gone as (
        delete from held_rows r
        where r.topic = lift_hold.topic and is_held_by(lifted, r.topic, r.key, r.id)
            and not exists (
                select from holds h
                where h.topic = r.topic and is_held_by(h, r.topic, r.key, r.id)
            )
        returning *
    )
    insert into outbox (
        shard, class, id, topic, key, value, headers, entity, version, cause,
        reexport_id, created_at
    )
    select shard, class, id, g.topic, g.key, value, headers, entity, version, cause,
        reexport_id, created_at
    from gone g;
    get diagnostics freed = row_count;
    return freed;
end
$function$;

-- Where relays of this schema listen: the same name as jobs_lib.db.channel.
create function channel(kind text) returns text
language sql stable set search_path from current as $function$
    select case
        when octet_length(current_schema()) + 1 + octet_length(kind) <= 63
            then current_schema() || '.' || kind
        else lpad(to_hex(murmur2(convert_to(current_schema(), 'UTF8'))), 8, '0')
            || '.' || kind
    end
$function$;
"""

DOWNGRADE = """
select lift_hold(topic, key, row_id) from holds;
drop function channel(text);
drop function lift_hold;
drop function is_held_by;
drop table held_rows;
drop table holds;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
