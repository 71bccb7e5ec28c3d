"""However many keys are held, a row looks only for its own hold."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest

from jobs_lib.outbox.block import Block, Refusal
from tests.plans.test_plans import Plans
from tests.support.apps import count, make_app
from tests.support.outbox.steps import RelaySteps, own_shards

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
with reexport as (
    insert into jobs_lib.reexports (entity, topic, rate, state, total, refilled_at)
    values ('things', 'states', 6000, 'running', 50, now() - interval '1 hour')
    returning id
),
few as (
    -- Of a shard whose block has room for rows of re-exports.
    insert into jobs_lib.outbox (shard, topic, key, value)
    select 1, case n % 2 when 0 then 'states' else 'other' end, 'few' || n, ''
    from generate_series(1, 20) n
),
batch as (
    insert into jobs_lib.outbox (shard, class, topic, key, entity, cause, reexport_id)
    select 1, 1, 'states', 'batch' || n, 'things', 'reexport', r.id
    from reexport r, generate_series(1, 50) n
)
insert into jobs_lib.outbox (shard, topic, key, value)
select 0, case n % 2 when 0 then 'states' else 'other' end, 'k' || n, ''
from generate_series(1, 6000) n
"""


@pytest.fixture
def relay(database, admin):
    """A relay of two shards that does nothing by itself."""
    own_shards(admin, OWNER, [0, 1])
    return RelaySteps(make_app(database.url), OWNER)


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
    for part in (
        "o.class = 0 and",
        "recursive present",
        "not r.waits",
        "e.state",
        "set retry_at",
    ):
        assert any(part in plan for plan in told), part
    for plan in told:
        assert not re.search(r"Seq Scan on (holds|held_rows|outbox)", plan), plan
        # A hash of holds would contain all of them.
        for name in re.findall(r"Scan using (\w+) on holds", plan):
            assert name in {"holds_of", "holds_due", "holds_of_topics"}, plan
        assert not re.search(r"Hash.*\n.*Scan using \w+ on holds", plan), plan


def use_holds(database, admin, connection, relay) -> None:
    """Run every statement of a relay that reads holds."""
    block = relay.read(connection, 0)
    assert len(block.outgoing) == 5_000
    refused, behind = block.records[10:12]
    some = Block([], refusals=[Refusal(refused, "too large")], behind=[*behind.rows])
    relay.hold(connection, 0, some)
    admin.execute(
        "update jobs_lib.holds set retry_at = now() where key = %s", [refused.key]
    )
    query = database.queries["due_holds"]
    due = connection.execute(query, {"shards": [0]}).fetchall()
    ((topic, key, _, _, row_id, _),) = due
    assert (key, row_id) == (refused.key, refused.row_id)
    lifted = {"topic": topic, "key": key, "row_id": None}
    connection.execute(database.queries["requeue_hold"], lifted)
    freed = connection.execute(database.queries["lift_hold"], lifted).fetchone()
    assert freed == (1,)
    # Read the rows of the re-export, too; the first of them are held now.
    few = relay.read(connection, 1)
    assert few.reexports
    assert len(few.outgoing) == 20
    relay.hold(connection, 1, few)
    assert count(admin, "held_rows where class = 1") == 50
    held = admin.execute("select id from jobs_lib.held_rows where class = 1 limit 1")
    assert relay.reader.read_held(connection, 1, 1, *held.fetchone()).refusals


@pytest.mark.guarantee("FP25")
def test_a_row_reads_no_more_than_its_own_hold_however_many_there_are(
    database, admin, relay
):
    admin.execute(_ROWS)
    with database.connect("relay", impatient=True) as connection:
        plans = Plans(connection)
        for setting in ("analyze", "buffers"):
            connection.execute(f"set auto_explain.log_{setting} = on")

        def read(shard: int) -> int:
            """Count the pages of the live rows of a block."""
            with plans.told(generic=True) as told:
                relay.read(connection, shard)
            (plan,) = [one for one in told if "o.class = 0 and" in one]
            (found,) = re.findall(r"Buffers: shared (.*)", plan)[:1]
            return sum(map(int, re.findall(r"(?:hit|read)=(\d+)", found)))

        # The first reads set hints and read catalogues.
        read(0), read(1)
        without = read(0), read(1)
        admin.execute(_HELD, {"holds": HOLDS})
        admin.execute("vacuum jobs_lib.holds")
        some = read(0), read(1)
        # Its own hold is at the end of a path of three or four pages through an index.
        # A look through all holds would read thousands.
        assert some[0] - without[0] <= 4 * 2_500 + 100, (without, some)
        assert some[1] - without[1] <= 4 * 10 + 100, (without, some)
