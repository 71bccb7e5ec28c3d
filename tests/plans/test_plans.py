"""The plans of the hot statements, as they really run, under many statistics."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import psycopg
import pytest

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.polling import Poller
from jobs_lib.executor.lane import Outcome, Result
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.executor.settling.completer import Completer
from jobs_lib.outbox.block import Block, Refusal
from jobs_lib.settings import Settings
from tests.support.apps import HOME, make_app
from tests.support.outbox.steps import RelaySteps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import Job

OWNER = uuid4()
INDEXES = {
    "jobs_pkey",
    "jobs_of_group",
    "jobs_of_priority",
    "jobs_due",
    "jobs_unique",
    "outbox_pkey",
    "outbox_of_key",
    "outbox_of_reexport",
}


class Plans:
    """The plans that the server used, from the notices of auto_explain."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._found: list[str] = []
        connection.add_notice_handler(
            lambda notice: self._found.append(notice.message_primary or "")
        )
        connection.execute("load 'auto_explain'")

    @contextlib.contextmanager
    def told(self, *, generic: bool) -> Iterator[list[str]]:
        """Collect the plans of the statements inside, with generic or custom plans."""
        mode = "force_generic_plan" if generic else "force_custom_plan"
        self._connection.execute(f"set plan_cache_mode = {mode}")
        self._connection.execute("set auto_explain.log_nested_statements = on")
        self._connection.execute("set client_min_messages = log")
        self._connection.execute("set auto_explain.log_min_duration = 0")
        self._found.clear()
        told: list[str] = []
        yield told
        told += [plan for plan in self._found if "Query Text" in plan]
        self._connection.execute("set auto_explain.log_min_duration = -1")


def show_pages(connection) -> None:
    """Let each plan say how many pages its statement has read: see count_pages."""
    for name in ("analyze", "buffers"):
        connection.execute(f"set auto_explain.log_{name} = on")
    connection.execute("set auto_explain.log_format = json")


def count_pages(told: str) -> int:
    """Count the pages that a statement has read, by its plan."""
    plan = json.loads(told[told.index("{") :])["Plan"]
    pages: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return pages


def fill(connection, groups: int, jobs: int) -> None:
    connection.execute(
        'insert into jobs_lib.jobs (origin, type, "group", payload)'
        " select 'local/' || g %% 16, 'work', 'g' || g %% %s, '{}'"
        " from generate_series(1, %s) g",
        (groups, jobs),
    )
    connection.execute(
        "insert into jobs_lib.jobs (origin, type, payload)"
        " select 'local/' || g %% 16, 'work', '{}' from generate_series(1, %s) g",
        (jobs,),
    )
    connection.execute(
        "insert into jobs_lib.outbox (shard, topic, key, value)"
        " select g %% 16, 'states', 'k' || g %% 1000, '' from generate_series(1, %s) g",
        (2 * jobs,),
    )


def analyze(connection) -> None:
    connection.execute("analyze jobs_lib.jobs")
    connection.execute("analyze jobs_lib.outbox")


def emptied(connection) -> None:
    """The table was analysed almost empty, with many dead rows; then a few arrived."""
    connection.execute("alter table jobs_lib.jobs set (autovacuum_enabled = off)")
    connection.execute("alter table jobs_lib.outbox set (autovacuum_enabled = off)")
    fill(connection, 100, 50_000)
    connection.execute("delete from jobs_lib.jobs")
    connection.execute("delete from jobs_lib.outbox")
    analyze(connection)
    fill(connection, 10, 500)


def full(connection) -> None:
    """The table has many rows in many groups, and fresh statistics."""
    fill(connection, 50_000, 150_000)
    analyze(connection)


def few_groups(connection) -> None:
    """The table has many rows in very few groups."""
    fill(connection, 3, 60_000)
    analyze(connection)


def uncounted(connection) -> None:
    """The table was vacuumed and analysed beside many uncommitted rows."""
    info = connection.info
    with psycopg.connect(info.dsn, password=info.password) as loading:
        fill(loading, 1_000, 50_000)
        connection.execute("vacuum analyze jobs_lib.jobs")
        connection.execute("vacuum analyze jobs_lib.outbox")


@pytest.mark.parametrize("generic", [True, False], ids=["generic", "custom"])
@pytest.mark.parametrize(
    ("impatient", "state"),
    [
        # This must hold even if no setting restricts the planner, as behind PgBouncer.
        *((False, state) for state in (emptied, full, few_groups)),
        # The loops have these settings.
        *((True, state) for state in (emptied, full, few_groups, uncounted)),
    ],
)
def test_no_hot_statement_reads_more_than_it_needs(database, impatient, state, generic):
    whole = r"(Seq|Bitmap Heap)" if impatient else "Seq"
    sorted_at_most = 5_000 if impatient else 2 * Settings().relay_block
    with database.connect("test", impatient=impatient) as connection:
        state(connection)
        for role, origins in (
            ("execute", HOME),
            ("relay", [f"shard/{n}" for n in range(16)]),
        ):
            connection.execute(
                "insert into jobs_lib.origins (role, origin, owner, epoch)"
                " select %s, unnest(%s::text[]), %s, 1",
                (role, origins, OWNER),
            )
        # Before PostgreSQL 17, a plan does not show what is compared with a list.
        compared = r"\|\| key\) = " if connection.info.server_version >= 170_000 else ""
        plans = Plans(connection)
        with plans.told(generic=generic) as told:
            use_enqueue(database, connection)
            use_jobs(database, connection)
            use_outbox(database, connection)
    assert len(told) > 10
    for plan in told:
        assert not re.search(rf"{whole} Scan on (jobs|outbox)", plan), plan
        # Every look into the table starts at an origin or a shard.
        for index in re.findall(r"using (\w+) on (?:jobs|outbox)", plan):
            assert index in INDEXES, plan
        # The index gives a backlog its order. Hardly more rows are sorted than taken.
        sorts = r"Sort  \(cost=\S+ rows=(\d+) .*\n *Sort Key: [jo]"
        for rows in re.findall(sorts, plan):
            assert int(rows) < sorted_at_most, plan
    # For no row of a settling key are all other rows of that key read.
    reads = [plan for plan in told if "created_at <= statement_timestamp" in plan]
    assert reads
    for plan in reads:
        assert re.search(rf"Filter: .*created_at.*{compared}\(hashed", plan), plan


def use_enqueue(database, connection) -> None:
    """Look up an existing job by its key."""
    unique = make_app(database.url).job(name="work")(lambda job: None)
    with connection.transaction():
        for origin in ("local/1", "local/2"):
            unique.options(unique="k", origin=origin).enqueue(connection)


def use_jobs(database, connection) -> None:
    """Run every statement of an executor's round."""
    app = make_app("")
    app.job(name="work")(lambda job: None)

    @app.job(name="last", group="key", last_only=True)
    def last(job: Job, key: str) -> None: ...

    types = app.jobs
    claimer = Claimer(OWNER, UUID(int=1), types)
    completer = Completer(OWNER, types)
    poller = Poller(claimer, 0.01)
    round_trip = RoundTrip(connection, database.queries, prepare=True)

    def send(*statements):
        (answer,), failure = round_trip.exchange(statements)
        assert failure is None
        return answer

    claimer.take(dict.fromkeys(HOME, 1))
    claimer.windows.prioritized = True
    for position in claimer.cursors.values():
        position.seen = position.may_have_more = True
    items, _ = claimer.read(send(claimer.prepare(200))[0])
    jobs = [j for item in items for j in getattr(item, "jobs", [item])]
    assert len(jobs) > 50
    outcomes = [
        Outcome(jobs[-3], Result.SUPERSEDED),
        Outcome(jobs[-2], Result.RETRIED, "no", 0.0),
        Outcome(jobs[-1], Result.DISCARDED, "never"),
    ]
    settlements = completer.prepare(jobs[:-3], outcomes, claimer.epochs)
    assert len(settlements) == 4
    send(*[(s.query, s.parameters) for s in settlements])
    stuck = claimer.cursors[HOME[0]]
    stuck.may_have_more, stuck.jump_factor = True, 4
    jump = claimer.prepare_jump(200)
    assert jump is not None
    send(jump)
    send(("payload", {"origin": HOME[0], "id": 1}))
    plain = claimer.windows.prepare_plain(HOME[0], 100)
    who = {"owner": OWNER, "role": "execute", "seq": 2, "types": claimer.scope.types}
    limits = claimer.scope.parameters() | claimer.refills.parameters([])
    send(("claim_plain", who | plain | limits))
    for job in jobs:
        claimer.in_flight.remove(job)
    for lane in list(claimer.in_flight.lanes.values()):
        claimer.in_flight.end_lane(lane)
    trimmed = {"owner": OWNER, "seqs": [1], "ids": [jobs[0].id]}
    send(("trim_claims", trimmed))
    poller._next_at = poller._due_at = poller._late_commits._next_at = 0
    for batch in poller.prepare(busy=True, hinted=False):
        batch.answer = send(*batch.statements)
        batch.read()


def use_outbox(database, connection) -> None:
    """Run every statement of a relay's block."""
    app = make_app(database.url)
    app.topic("calm", compacted=True, settle=60)
    relay = RelaySteps(app, OWNER)
    # Make a complete look, and a short one after it.
    relay.starts.due_at = 0.0
    assert relay.starts.find_pending(connection, range(16))
    block = relay.read(connection, 3)
    ids, _ = block.done
    assert ids
    large = {"shard": 3, "ids": ids}
    assert connection.execute(database.queries["read_values"], large).fetchall()
    kept = Block(block.records[:10])
    refused, behind = block.records[10:12]
    kept.refusals.append(Refusal(refused, "too large"))
    kept.behind += behind.rows
    relay.delete(connection, 3, kept)
    # Two rows have moved since, and the block also has rows of a re-export.
    for record in block.records[12:14]:
        record.place = block.records[20].place
    relay.delete(connection, 3, Block(block.records[12:15]))
    relay.delete(connection, 3, Block(block.records[15:18], reexports={1}))
    relay.hold(connection, 3, kept)
    connection.execute("update jobs_lib.holds set retry_at = now()")
    due = connection.execute(database.queries["due_holds"], {"shards": [3]}).fetchall()
    ((topic, key, _, _, row_id, _),) = due
    assert relay.reader.read_held(connection, 3, 1, row_id)
    relay.read(connection, 3)
    lifted = {"topic": topic, "key": key, "row_id": None}
    connection.execute(database.queries["lift_hold"], lifted)


def test_no_statement_of_ours_is_compiled(database):
    """JIT may take seconds for statements that run a millisecond."""
    with database.connect("test") as connection:
        assert connection.execute("show jit").fetchone() == ("off",)
