"""The streams that are published to, and the requests by which events were published.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0027_streams"
down_revision = "0026_rebuilds"
branch_labels = None
depends_on = None

UPGRADE = """
-- Each process that publishes reads the rows of its streams again and again.
create table streams (
    topic text collate "C" primary key,
    -- How long an event may take from the reading of this row until it is in Kafka: the
    -- longest time of all processes that publish to it. Only a command that adds
    -- partitions makes it shorter.
    send_seconds float8 not null,
    -- A command that adds partitions; null if none does. Nobody publishes between
    -- `renewed_at` and `stopped_until`, which the command moves on as long as it lives.
    grower uuid,
    partitions int,
    stopped_at timestamptz,
    renewed_at timestamptz,
    stopped_until timestamptz
);

-- A request is here before its event is sent, and gets the event's place afterwards.
-- The answer needs no more: its content is the request's, whose digest is the same.
create table requests (
    topic text collate "C" not null,
    id text collate "C" not null,
    -- SHA-256 of key and value.
    digest bytea not null,
    -- Null: the event would change nothing, so that none was sent.
    partition int,
    -- The event is not before this offset: the partition had this end or a higher one.
    search_from bigint,
    -- Until then its sender may still send it. Later others look for it in the topic.
    sent_until timestamptz not null,
    -- How often somebody has begun to send it. Only the newest one may.
    attempts int not null default 1,
    -- Where the event is. Null: not known yet, or there is none.
    record_offset bigint,
    remembered_at timestamptz not null default clock_timestamp(),
    primary key (topic, id)
);
create index requests_by_age on requests (remembered_at);
"""

DOWNGRADE = """
drop table requests, streams;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
