"""Topics, processes and the owners of origins: who may touch what.

Locks: none that anybody waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

UPGRADE = """
create table installation (
    only_row boolean primary key default true check (only_row),
    -- Part of every idempotency key and transactional id: no two databases share one.
    id uuid not null default gen_random_uuid(),
    -- Fixed for the life of the schema: a row's shard is stored when it is written.
    shards smallint not null default 16 check (shards between 1 and 1024)
);
insert into installation default values;

-- How many partitions count when a group's origin is computed: the one source for
-- Python, SQL and Spark. A growth of the Kafka topic does not change it.
create table topics (
    topic text collate "C" primary key check (topic ~ '^[a-zA-Z0-9._-]{1,249}$'),
    partitions int not null check (partitions between 1 and 100000),
    home boolean not null default false
);
create unique index topics_one_home on topics (home) where home;
-- Without Kafka there is still a home: executors share its partitions by heartbeat.
insert into topics (topic, partitions, home) values ('local', 16, true);

create table processes (
    id uuid primary key,
    pod text not null,
    roles text[] not null,
    host text not null,
    pid int not null,
    version text not null,
    started_at timestamptz not null default clock_timestamp(),
    heartbeat_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);

-- The fence. A row is share-locked under owner and epoch by whatever acts on the
-- origin, and locked for update by a take-over, which raises the epoch.
create table origins (
    -- 'execute', 'relay' or 'consume:<consumer group>'; roles never fence each other.
    role text collate "C" not null
        check (role in ('execute', 'relay') or role like 'consume:_%'),
    origin text collate "C" not null check (origin ~ '^[a-zA-Z0-9._-]+/[0-9]+$'),
    owner uuid,
    epoch bigint not null default 0,
    since timestamptz not null default clock_timestamp(),
    primary key (role, origin)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);
create index origins_of_owner on origins (owner) where owner is not null;
"""

DOWNGRADE = """
drop table origins, processes, topics, installation;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
