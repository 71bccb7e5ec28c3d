"""Which environment the database serves, and how its topics are named in Kafka.

Locks: `installation` exclusively for an instant.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

UPGRADE = """
-- A template has a place for the name only: `dev.{name}`.
alter table installation
    add column environment text not null default '',
    add column topic_template text not null default '{name}'
        check (topic_template ~ '^[a-zA-Z0-9._-]*[{]name[}][a-zA-Z0-9._-]*$');

-- The name in Kafka of a topic that a service declares, as jobs_lib.naming makes it.
create function topic_name(name text) returns text
language sql stable parallel safe set search_path from current as $function$
    select replace(i.topic_template, '{name}', name) from installation i
$function$;
"""

DOWNGRADE = """
drop function topic_name;
alter table installation drop column topic_template, drop column environment;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
