"""The installation: its identity, its environment, the releases it serves, its roles.

Locks: none that anybody waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0001_installation"
down_revision = None
branch_labels = None
depends_on = None

UPGRADE = """
create table installation (
    only_row boolean primary key default true check (only_row),
    -- Part of every idempotency key and transactional id: no two databases share one.
    id uuid not null default gen_random_uuid(),
    -- Fixed for the life of the schema: the shard of a row is stored with the row.
    shards smallint not null default 16 check (shards between 1 and 1024),
    -- The oldest version whose releases these tables serve, by which a release can tell
    -- whether it may work with newer tables. A revision that takes something away
    -- raises it to the oldest version whose releases do without; one that only adds
    -- leaves it.
    compatible_from text not null default '0001_installation',
    environment text not null default '',
    -- The name of each topic in Kafka. It has one place, for the topic's own name:
    -- `dev.{name}`.
    topic_template text not null default '{name}'
        check (topic_template ~ '^[a-zA-Z0-9._-]*[{]name[}][a-zA-Z0-9._-]*$')
);
insert into installation default values;

-- The name in Kafka of a topic that a service declares: the same name as
-- jobs_lib.naming.name_in_kafka makes.
create function topic_name(name text) returns text
language sql stable parallel safe as $function$
    select replace(i.topic_template, '{name}', name) from installation i
$function$;

-- Which role was granted which kind of rights. A later revision grants it what it adds.
create table grantees (
    role name not null,
    kind text not null check (kind in ('service', 'enqueue', 'read')),
    granted_at timestamptz not null default clock_timestamp(),
    primary key (role, kind)
);
"""

DOWNGRADE = """
drop function topic_name;
drop table grantees, installation;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
