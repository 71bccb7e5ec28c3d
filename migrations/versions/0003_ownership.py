"""Topics, processes, apps, and the owners of origins.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0003_ownership"
down_revision = "0002_grantees"
branch_labels = None
depends_on = None

UPGRADE = """
-- The number of partitions by which the origin of a group is computed: Python, SQL and
-- Spark all read it here. It stays the same when the topic grows in Kafka.
create table topics (
    topic text collate "C" primary key check (topic ~ '^[a-zA-Z0-9._-]{1,249}$'),
    partitions int not null check (partitions between 1 and 100000),
    home boolean not null default false,
    -- Roles that only enqueue lock the row of the home topic. A role may lock a row
    -- only if it may update one of its columns. They may update this one, which can
    -- have no other value.
    lockable boolean not null default true check (lockable)
);
create unique index topics_one_home on topics (home) where home;
-- A home exists without Kafka, too: executors share its partitions by heartbeat.
insert into topics (topic, partitions, home) values ('local', 16, true);

create table processes (
    id uuid primary key,
    pod text not null,
    roles text[] not null,
    host text not null,
    pid int not null,
    version text not null,
    started_at timestamptz not null default clock_timestamp(),
    heartbeat_at timestamptz not null default clock_timestamp(),
    -- The job types that the process has handlers for. Null: its release did not say.
    types text[],
    -- The topics whose partitions its executor follows. Null: its release did not say.
    topics text[],
    -- Types for which all workers of the process are busy, or for which it has too few
    -- slots. Null: no type waits for a worker or a slot.
    busy jsonb
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

-- The apps whose executors have run here. The first one has the role 'execute', and so
-- shares its origins with pods that know of no apps.
create table apps (
    name text collate "C" primary key,
    role text collate "C" not null unique,
    since timestamptz not null default clock_timestamp()
);

-- The fence. Each action on an origin locks its row for share, under owner and epoch.
-- A take-over locks the row for update, and raises the epoch.
create table origins (
    -- 'execute' or 'execute:<app>', 'relay', or 'consume:<consumer group>'. Roles never
    -- fence each other.
    role text collate "C" not null
        check (
            role in ('execute', 'relay')
            or role like 'execute:_%' or role like 'consume:_%'
        ),
    origin text collate "C" not null check (origin ~ '^[a-zA-Z0-9._-]+/[0-9]+$'),
    owner uuid,
    epoch bigint not null default 0,
    since timestamptz not null default clock_timestamp(),
    -- The last transaction that took jobs out of the origin without its owner. A claim
    -- with an older snapshot still sees what that transaction has removed. The column
    -- is a bigint, since SQLAlchemy does not know xid8.
    changed_by bigint,
    primary key (role, origin)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);
create index origins_of_owner on origins (owner) where owner is not null;
"""

DOWNGRADE = """
drop table origins, apps, processes, topics;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
