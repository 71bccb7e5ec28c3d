"""The installation: its identity, its environment, and the releases it serves.

Locks: none that another session waits for; all tables are new.
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
    -- The oldest version whose releases these tables serve. By it a release knows
    -- whether it may work with newer tables. A revision that removes something raises
    -- it to the oldest version whose releases do not use that. A revision that only
    -- adds leaves it unchanged.
    compatible_from text not null default '0001_installation',
    environment text not null default '',
    -- How a topic is named in Kafka, such as `dev.{name}`: {name} stands for the
    -- topic's own name.
    topic_template text not null default '{name}'
        check (topic_template ~ '^[a-zA-Z0-9._-]*[{]name[}][a-zA-Z0-9._-]*$')
);
insert into installation default values;

-- The name in Kafka of a topic that a service declares. jobs_lib.naming.name_in_kafka
-- computes the same name.
create function topic_name(name text) returns text
language sql stable parallel safe as $function$
    select replace(i.topic_template, '{name}', name) from installation i
$function$;
"""

DOWNGRADE = """
drop function topic_name;
drop table installation;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
