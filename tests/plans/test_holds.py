"""However many keys are held, a row looks for its own hold alone."""

from __future__ import annotations

import re
import time
from uuid import uuid4

import pytest

from jobs_lib.outbox.block import Block, Refusal
from jobs_lib.outbox.relay import Relay
from tests.plans.test_plans import Plans
from tests.support.apps import make_app

OWNER = uuid4()
HOLDS = 20_000
_HELD = """
with row as (
    insert into jobs_lib.held_rows
        (shard, class, id, topic, key, value, cause, created_at)
    select 0, 0, 1000000 + n, 'states', 'held' || n, '', 'live', now()
    from generate_series(1, %(holds)s) n
)
insert into jobs_lib.holds (topic, key, error, retry_at)
select 'states', 'held' || n, 'too large', now() + interval '9 minutes'
from generate_series(1, %(holds)s) n
"""
_ROWS = """
insert into jobs_lib.outbox (shard, topic, key, value)
select 0, case n % 2 when 0 then 'states' else 'other' end, 'k' || n, ''
from generate_series(1, 6000) n
"""


@pytest.fixture
def relay(database, admin):
    """The relay of shard 0, which does nothing by itself."""
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('relay', 'shard/0', %s, 1)",
        [OWNER],
    )
    settings = make_app(database.url).settings
    return Relay(
        database, settings, OWNER, OWNER, entities={}, topics={}, source="test"
    )


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("generic", [True, False], ids=["generic", "custom"])
@pytest.mark.parametrize("analyzed", ["empty", "full", "never"])
def test_no_statement_of_the_relay_reads_all_holds(
    database, admin, relay, analyzed, generic
):
    for table in ("holds", "held_rows"):
        admin.execute(f"alter table jobs_lib.{table} set (autovacuum_enabled = off)")
    if analyzed == "empty":
        admin.execute("vacuum analyze jobs_lib.holds, jobs_lib.held_rows")
    admin.execute(_ROWS)
    with database.connect("test", impatient=True) as connection:
        plans = Plans(connection)
        connection.execute(_HELD, {"holds": HOLDS})
        if analyzed == "full":
            admin.execute("vacuum analyze jobs_lib.holds, jobs_lib.held_rows")
        with plans.told(generic=generic) as told:
            use_holds(database, admin, connection, relay)
    assert len(told) > 5
    for plan in told:
        assert not re.search(r"Seq Scan on (holds|held_rows|outbox)", plan), plan
        # A hash of holds would hold them all.
        for name in re.findall(r"Scan using (\w+) on holds", plan):
            assert name in {"holds_of", "holds_due", "holds_of_topics"}, plan
        assert not re.search(r"Hash.*\n.*Scan using \w+ on holds", plan), plan


def use_holds(database, admin, connection, relay) -> None:
    """Every statement of a relay that asks for holds."""
    sender, reader = relay._senders[0], relay._reader
    block = reader.read(connection, 0, 1)
    assert len(block.outgoing) == 5_000
    refused, behind = block.records[10:12]
    some = Block([], refusals=[Refusal(refused, "too large")], behind=[*behind.rows])
    sender._hold(connection, 0, 1, some)
    admin.execute(
        "update jobs_lib.holds set retry_at = now() where key = %s", [refused.key]
    )
    query = database.queries["due_holds"]
    due = connection.execute(query, {"shards": [0]}).fetchall()
    ((topic, key, _, _, row_id),) = due
    assert (key, row_id) == (refused.key, refused.row_id)
    lifted = {"topic": topic, "key": key, "row_id": None}
    freed = connection.execute(database.queries["lift_hold"], lifted).fetchone()
    assert freed == (1,)


@pytest.mark.guarantee("FP25")
def test_a_block_of_good_rows_is_read_in_about_the_time_that_it_takes_without_holds(
    database, admin, relay
):
    admin.execute(_ROWS)
    with database.connect("relay", impatient=True) as connection:

        def read() -> float:
            """The best of some: whatever else runs makes it longer, never shorter."""
            times = []
            for _ in range(10):
                began = time.perf_counter()
                block = relay._reader.read(connection, 0, 1)
                times.append(time.perf_counter() - began)
                assert len(block.outgoing) == 5_000
            return min(times)

        without = read()
        admin.execute(_HELD, {"holds": 5 * HOLDS})
        # By its index a row finds its own in microseconds; a look through all holds
        # took a thousand times as long as the whole block.
        assert read() < 5 * without
