"""Apps on the same tables: each owns the origins for the types that it knows.

Locks: `origins` against claims and take-overs, for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

UPGRADE = """
-- The apps whose executors have run here. The first one has the role that releases
-- before this table know, so that pods of both share its origins.
create table apps (
    name text collate "C" primary key,
    role text collate "C" not null unique,
    since timestamptz not null default clock_timestamp()
);

alter table origins
    drop constraint origins_role_check,
    -- 'execute' or 'execute:<app>', 'relay', 'consume:<consumer group>'.
    add constraint origins_role_check check (
        role in ('execute', 'relay') or role like 'execute:_%' or role like 'consume:_%'
    );

-- As before, in the role of an app. The one that names no role serves earlier releases.
create function complete_job(
    owner uuid, origin text, epoch bigint, id bigint, attempt int, keep int,
    before bigint[], before_keep int[], role text
) returns void language plpgsql set plan_cache_mode = 'force_generic_plan'
as $function$
declare
    own int;
begin
    perform from origins o
    where o.role = complete_job.role and o.origin = complete_job.origin
        and o.owner = complete_job.owner and o.epoch = complete_job.epoch
    for share;
    if not found then
        raise exception 'origin % is no longer owned at epoch %', origin, epoch
            using errcode = 'JB001';
    end if;
    with done as (
        select b.id, b.keep
        from unnest(before || complete_job.id, before_keep || complete_job.keep)
            as b(id, keep)
    ), deleted as (
        delete from jobs j
        where j.origin = complete_job.origin and j.id = any (before || complete_job.id)
            -- An attempt that ran out of time may still be running somewhere.
            and (
                j.id <> complete_job.id
                or j.attempt + j.crashes + 1 = complete_job.attempt
            )
        returning j.*
    ), kept as (
        insert into history
            (keep_until, id, origin, type, "group", outcome, attempt, enqueued_at)
        select (clock_timestamp() at time zone 'UTC')::date + done.keep,
            d.id, d.origin, d.type, d."group", 'completed',
            d.attempt + d.crashes + 1, d.enqueued_at
        from deleted d join done on done.id = d.id
        where done.keep is not null
    )
    select count(*) into own from deleted d where d.id = complete_job.id;
    if own <> 1 then
        raise exception 'job % is no longer there', complete_job.id
            using errcode = 'JB002';
    end if;
end
$function$;
"""

DOWNGRADE = """
drop function complete_job(
    uuid, text, bigint, bigint, int, int, bigint[], int[], text
);
delete from origins where role like 'execute:%';
alter table origins
    drop constraint origins_role_check,
    add constraint origins_role_check check (
        role in ('execute', 'relay') or role like 'consume:_%'
    );
drop table apps;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
