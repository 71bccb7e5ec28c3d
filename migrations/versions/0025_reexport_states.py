"""Re-exports whose states come from a DataFrame, and lie here until they are sent.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0025_reexport_states"
down_revision = "0024_reexported_changes"
branch_labels = None
depends_on = None

UPGRADE = """
-- States that wait to be sent. Each re-export has a partition of its own, which is
-- dropped at its end: to delete the rows would take as long as to write them.
create table reexport_states (
    reexport_id bigint not null,
    key text collate "C" not null,
    version bigint not null,
    value bytea not null,
    -- Of topics whose rows say it themselves; null for others.
    content_type text collate "C",
    primary key (reexport_id, key)
) partition by list (reexport_id);

-- The versions that have left live since a re-export of a DataFrame began: an older
-- state must not follow.
create table reexport_versions (
    reexport_id bigint not null,
    key text collate "C" not null,
    -- Of a record without a version, the greatest number: it counts as newer.
    version bigint not null,
    primary key (reexport_id, key)
) with (autovacuum_vacuum_scale_factor = 0.05);

-- A role that starts re-exports may not own the tables. So the functions below run with
-- the rights of the tables' owner, and do only what is due.

-- Makes the partition of a re-export. To attach it keeps nobody from reading or writing
-- the others, as `create table ... partition of` would.
create function make_reexport_states(reexport bigint) returns void
language plpgsql security definer as $function$
declare
    name text := 'reexport_states_' || reexport;
begin
    if not exists (
        select from reexports x
        where x.id = reexport and x.source = 'frame'
            and x.state in ('loading', 'running', 'paused')
    ) then
        raise exception 'the re-export % stages no states', reexport;
    end if;
    execute format(
        'create table %I.%I (like %I.reexport_states including all)',
        current_schema(), name, current_schema()
    );
    execute format(
        'alter table %I.reexport_states attach partition %I.%I for values in (%L)',
        current_schema(), current_schema(), name, reexport
    );
end
$function$;

-- Returns the space of an ended re-export's states to the disk. It locks only these.
create function empty_reexport_states(reexport bigint) returns void
language plpgsql security definer as $function$
begin
    if exists (
        select from reexports x
        where x.id = reexport and x.state in ('loading', 'running', 'paused')
    ) then
        raise exception 'the states of the re-export % are still to be sent', reexport;
    end if;
    execute format(
        'truncate table %I.%I', current_schema(), 'reexport_states_' || reexport
    );
end
$function$;

-- Drops the partition, which is already empty. This locks the states of all re-exports
-- for an instant, so the caller sets a short lock_timeout and tries again.
create function drop_reexport_states(reexport bigint) returns void
language plpgsql security definer as $function$
begin
    if exists (
        select from reexports x
        where x.id = reexport and x.state in ('loading', 'running', 'paused')
    ) then
        raise exception 'the states of the re-export % are still to be sent', reexport;
    end if;
    execute format(
        'drop table %I.%I', current_schema(), 'reexport_states_' || reexport
    );
end
$function$;
"""

DOWNGRADE = """
drop function drop_reexport_states, empty_reexport_states, make_reexport_states;
drop table reexport_versions, reexport_states;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
