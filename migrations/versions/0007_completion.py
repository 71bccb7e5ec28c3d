"""The completion of a job in the transaction of its handler.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0007_completion"
down_revision = "0006_history"
branch_labels = None
depends_on = None

UPGRADE = """
-- Completes a job in the transaction of its handler. It also completes the jobs that
-- ran before it in its lane, since their completion may still be on its way.
-- If the process has lost the origin, the function raises instead of returning. Then
-- the commit that follows it in the same round trip becomes a rollback.
-- It is planned once. By default PostgreSQL would plan it at each call: it does not
-- know the length of the arrays, and guesses high. That took two thirds of the call.
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
    -- The executor completes the same jobs in the order of their places. So must this,
    -- or each would wait for a row that the other has: a retry moves a row behind.
    if cardinality(before) > 1 then
        perform from jobs j
        where j.origin = complete_job.origin and j.id = any (before)
        order by j.ctid
        for update;
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
drop function complete_job;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
