"""The requests by which events were published to streams, and what became of them.

Locks: none; the table is new.
"""

from __future__ import annotations

from alembic import op

revision = "0024_requests"
down_revision = "0023_done"
branch_labels = None
depends_on = None

UPGRADE = """
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
drop table requests;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
