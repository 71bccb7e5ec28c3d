"""Connections are cut, fall silent, or lose their last answer."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from jobs_lib import Rate, Record, exponential
from jobs_lib.errors import UnavailableError
from jobs_lib.operating import delete_discarded, retry, session
from jobs_lib.operating.home_topic import declare_topic
from jobs_lib.operating.read_models import place_tables
from jobs_lib.ownership.apps import find_role
from jobs_lib.postgres.revisions import check_version
from jobs_lib.reexport.control import list_latest
from jobs_lib.reexport.lag import LagWatch
from jobs_lib.service.maintenance import Maintenance
from jobs_lib.service.preparation import read_installation
from jobs_lib.service.service import Service
from jobs_lib.settings import default_settings
from tests.faults.helpers import attempts, count, effects, enqueue
from tests.support.apps import HOME, executing, heard, make_app, running
from tests.support.commands import fail_command
from tests.support.proxy import Proxy
from tests.support.records import produce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOBS = 200
TIMEOUT = 2


@pytest.fixture
def proxy(url):
    """A proxy before the test's database."""
    with Proxy.before(url) as proxy:
        yield proxy


def assert_all_ran_once(url: str, worker, wait_for) -> None:
    """Check that each of two types ran all its jobs once, at the first attempt."""
    wait_for(
        lambda: count(url) == 0,
        timeout=30,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert worker.running
    assert effects(url) == sorted([*range(JOBS)] * 2)
    assert attempts(url) == {("completed", 1)}, worker.output


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP8")
@pytest.mark.parametrize("fault", ["reset", "hold", "half_open"])
def test_a_connection_that_is_cut_or_silent_is_noticed_in_time(
    url, proxy, start_worker, wait_for, fault
):
    worker = start_worker(proxy.url(url), database_timeout=TIMEOUT, stale_after=60)
    enqueue(url, "add", JOBS)
    enqueue(url, "aadd", JOBS)
    wait_for(lambda: len(effects(url)) > 20, timeout=60, what="some have run")
    struck_at = time.monotonic()
    getattr(proxy, fault)()
    wait_for(
        lambda: "loop.failed loop=executor" in worker.output,
        timeout=20,
        what=lambda: f"it is noticed\n{worker.output}",
    )
    assert time.monotonic() - struck_at < TIMEOUT + 2
    proxy.release()
    assert_all_ran_once(url, worker, wait_for)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP8")
@pytest.mark.parametrize("busy", ["handler", "read model", "at rest"])
def test_a_silent_connection_of_a_consumer_is_noticed_in_time(
    url, admin, connect, proxy, wait_for, gate, bootstrap_servers, topic, busy
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name, handling = topic(1), threading.Event()
    app = make_app(
        proxy.url(url),
        database_timeout=TIMEOUT,
        stale_after=60,
        kafka_bootstrap_servers=bootstrap_servers,
    )
    if busy == "read model":
        app.read_model(name, table="rows", key="key", group=name)(
            lambda record: {"n": record.value}
        )
    else:

        @app.consumer(name, group=name)
        def handle(record, conn) -> None:
            conn.execute(
                "insert into rows values (%s, null, %s)", (record.key, record.value)
            )
            if record.value and busy == "handler":
                handling.set()
                gate.wait(60)

    def count_rows() -> int:
        return admin.execute("select from rows").rowcount

    produce(bootstrap_servers, name, [("k0", 0)])
    with heard("loop.failed") as failed, running(app, "consumers"):
        wait_for(lambda: count_rows() == 1, timeout=60, what="it reads")
        with connect() as blocker:
            if busy == "read model":
                blocker.execute("lock table rows in exclusive mode")
            if busy != "at rest":
                produce(bootstrap_servers, name, [("k1", 1)])
            if busy == "handler":
                assert handling.wait(60)
            if busy == "read model":
                waits = partial(connected_as, admin, "consume", "Lock")
                wait_for(waits, timeout=60, what="the rows wait")
            struck_at = time.monotonic()
            proxy.half_open()
            gate.set()
            wait_for(
                lambda: f"consume {name}" in [one["loop"] for _, one in failed],
                timeout=60,
                what="it is noticed",
            )
            assert time.monotonic() - struck_at < TIMEOUT + 3
        proxy.release()
        produce(bootstrap_servers, name, [("k2", 2)])
        expected = 2 if busy == "at rest" else 3
        wait_for(lambda: count_rows() == expected, timeout=60, what="it goes on")


@pytest.mark.expects("loop.failed")
def test_rows_that_wait_for_a_lock_leave_no_statement_behind(
    url, admin, connect, wait_for, bootstrap_servers, topic
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make_app(url, database_timeout=1, kafka_bootstrap_servers=bootstrap_servers)
    app.read_model(name, table="rows", key="key", group=name)(
        lambda record: {"n": record.value}
    )
    produce(bootstrap_servers, name, [("k0", 0)])
    blocker = connect()
    # Before the consumer starts: the record must not be in already.
    blocker.execute("lock table rows in exclusive mode")
    with heard("record.failed") as failed, running(app, "consumers"):
        # A busy machine may not connect within a second each time.
        wait_for(lambda: len(failed) > 2, timeout=150, what="it is told")
        assert connected_as(admin, "consume", "Lock") <= 1
        blocker.rollback()
        wait_for(
            lambda: admin.execute("select from rows").rowcount,
            timeout=60,
            what="the rows are in",
        )
    assert {str(one["error"]).split(":")[0] for _, one in failed} == {"QueryCanceled"}


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FP9")
@pytest.mark.parametrize("kind", ["add_and_say", "aadd_and_say"])
def test_a_commit_whose_answer_is_lost_is_not_repeated(
    url, proxy, start_worker, wait_for, kind
):
    worker = start_worker(proxy.url(url), workers=1)
    proxy.swallow("complete_job")
    enqueue(url, kind, 5)
    wait_for(proxy.swallowed.is_set, timeout=60, what="an answer was dropped")
    wait_for(
        lambda: count(url) == 0,
        timeout=60,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert effects(url) == [0, 1, 2, 3, 4]
    assert attempts(url) == {("completed", 1)}
    unknown = [line for line in worker.lines if line.startswith("UnknownCommit")]
    assert len(unknown) == 1, worker.output
    assert "unknown" in unknown[0]
    begun = [line for line in worker.lines if line.startswith("begun")]
    assert sorted(begun) == [f"begun {n} 1" for n in range(5)]


def test_a_commit_that_never_arrived_is_made_by_the_next_run(
    url, admin, proxy, start_worker, wait_for
):
    worker = start_worker(proxy.url(url), workers=1)
    # The server goes away between the question and the commit.
    admin.execute(
        "create function cut() returns trigger language plpgsql as $$ begin"
        " if nextval('cuts') = 1 then"
        "   perform pg_terminate_backend(pg_backend_pid());"
        " end if; return null; end $$;"
        "create sequence cuts;"
        "create constraint trigger cut after insert on effects"
        " deferrable initially deferred for each row execute function cut()"
    )
    enqueue(url, "add_and_say", 1)
    wait_for(
        lambda: count(url) == 0, timeout=60, what=lambda: f"it has run\n{worker.output}"
    )
    assert effects(url) == [0]
    assert attempts(url) == {("completed", 1)}
    begun = [line for line in worker.lines if line.startswith("begun")]
    assert begun == ["begun 0 1"] * 2
    assert any(line.startswith("UnknownCommit") for line in worker.lines)


@pytest.mark.guarantee("FP5")
def test_an_enqueue_cut_short_leaves_both_or_neither(url, admin, proxy):
    for n, point in enumerate(["insert into effects", "jobs_lib", "COMMIT"]):
        proxy.swallow(point)
        with pytest.raises(psycopg.OperationalError):
            enqueue_with_effect(proxy.url(url), n)
        assert proxy.swallowed.is_set()
        kept = effects(url)
        jobs = admin.execute(
            "select (payload->>'n')::int from jobs_lib.jobs order by 1"
        )
        assert [row[0] for row in jobs] == kept
        # The commit had arrived; a connection that was cut earlier leaves nothing.
        assert kept == ([n] if point == "COMMIT" else [])


def enqueue_with_effect(url: str, n: int) -> None:
    """Commit a change and its job in one transaction."""
    app = make_app(url)

    @app.job()
    def quick(job, n: int) -> None: ...

    with psycopg.connect(url) as connection:
        connection.execute("insert into effects values (%s)", (n,))
        quick.enqueue(connection, n=n)


@pytest.mark.parametrize("ever", [True, False], ids=["lost", "never"])
def test_executors_without_a_connection_for_hints_poll_at_the_plain_interval(
    url, connect, wait_for, ever
):
    interval = 1.0
    proxy = contextlib.ExitStack()
    app = make_app(
        url,
        direct_url=proxy.enter_context(Proxy.before(url)).url(url),
        poll_interval=interval,
        notify=False,
    )
    ran: list[float] = []

    @app.job()
    def work(job) -> None:
        ran.append(time.monotonic())

    def run_one() -> float:
        expected = len(ran) + 1
        with connect() as connection:
            work.enqueue(connection)
        enqueued_at = time.monotonic()
        wait_for(lambda: len(ran) == expected, timeout=30, what="it has run")
        return ran[-1] - enqueued_at

    if not ever:
        proxy.close()
    with heard("loop.failed") as failed, executing(app, HOME):
        run_one()
        proxy.close()  # nothing listens there after this
        wait_for(lambda: failed, what="the connection is missed")
        # With hints an executor looks ten times less often.
        assert max(run_one() for _ in range(4)) < 3 * interval
    assert {fields["loop"] for _, fields in failed} == {"hints"}


@pytest.mark.expects("loop.failed")
def test_a_direct_host_that_says_nothing_holds_up_no_claim(
    url, connect, wait_for, monkeypatch
):
    monkeypatch.setattr("jobs_lib.postgres.database._CONNECT_WITHIN", 60)
    with Proxy.before(url) as proxy:
        proxy.hold()
        app = make_app(url, direct_url=proxy.url(url), poll_interval=0.05)
        ran: list[int] = []

        @app.job()
        def work(job) -> None:
            ran.append(job.id)

        with heard("loop.failed") as failed, executing(app, HOME):
            for n in range(1, 4):
                with connect() as connection:
                    work.enqueue(connection)
                wait_for(lambda n=n: len(ran) == n, what="it has run")
            # Until here, no thread has given up its wait for that host.
            assert not failed


def add_first(app) -> tuple[Any, threading.Event, threading.Event]:
    """Add a job type that keeps a worker, once the pool has a connection.

    Returns it, what it sets when it has had one, and what lets it end.
    """
    lent, gate = threading.Event(), threading.Event()

    @app.job()
    def first(job) -> None:
        with job.transaction() as connection:
            connection.execute("select 1")
        lent.set()
        gate.wait(60)

    return first, lent, gate


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("J20", "FP8")
@pytest.mark.parametrize("fault", ["reset", "hold"])
@pytest.mark.parametrize("asked", ["payload", "start"])
def test_a_query_that_fails_before_the_handler_costs_no_attempt(
    url, connect, proxy, wait_for, monkeypatch, asked, fault
):
    # Jobs that wait for a worker are not released meanwhile.
    monkeypatch.setattr("jobs_lib.executor.dispatcher._HOARDED", 60.0)
    app = make_app(proxy.url(url), database_timeout=1, stale_after=60)
    first, lent, gate = add_first(app)
    rate = Rate(1_000) if asked == "start" else None

    @app.job(retry=exponential(max_attempts=1), rate=rate)
    def work(job, text: str) -> None: ...

    def ends() -> list[tuple[str, str]]:
        return [(e["job"].type, e["outcome"]) for _, e in ran]

    with connect() as connection:
        first.options(origin="local/1").enqueue(connection)
        text = "".join(map(str, range(10_000))) if asked == "payload" else ""
        work.options(origin="local/1").enqueue(connection, text=text)
    with heard("job.ran") as ran, executing(app, HOME, workers=1):
        wait_for(lent.is_set, what="the first one runs")
        getattr(proxy, fault)()
        gate.set()
        wait_for(
            lambda: ("work", "snoozed") in ends(), timeout=20, what="it is put off"
        )
        proxy.release()
        wait_for(lambda: count(url) == 0, timeout=40, what="all have run")
    assert attempts(url) == {("completed", 1)}


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("J9", "J20")
@pytest.mark.parametrize("asked", ["payload", "start", "begin", "commit", "async"])
def test_a_time_limit_does_not_count_the_wait_for_a_silent_database(
    url, connect, proxy, wait_for, monkeypatch, asked
):
    monkeypatch.setattr("jobs_lib.executor.dispatcher._HOARDED", 60.0)
    app = make_app(proxy.url(url), database_timeout=2, stale_after=60)
    first, lent, gate = add_first(app)
    held: list[str] = []

    def hold(moment: str) -> None:
        if asked == moment and not held:
            held.append(moment)
            proxy.hold()

    once = exponential(max_attempts=1)
    rate = Rate(1_000) if asked == "start" else None

    @app.job(time_limit=1, retry=once, rate=rate)
    def work(job, text: str) -> None:
        hold("begin")
        with job.transaction() as connection:
            connection.execute("select 1")
            hold("commit")

    @app.job(time_limit=1, retry=once)
    async def wait(job, text: str) -> None:
        async with job.transaction() as connection:
            await connection.execute("select 1")
            hold("async")

    def enqueue_timed(connection) -> None:
        kind = wait if asked == "async" else work
        text = "".join(map(str, range(10_000))) if asked == "payload" else ""
        kind.options(origin="local/1").enqueue(connection, text=text)

    with connect() as connection:
        first.options(origin="local/1").enqueue(connection)
        if asked != "async":
            # The same claim takes it, and it waits for the only worker.
            enqueue_timed(connection)
    with heard("job.ran") as ran, executing(app, HOME, workers=1):
        wait_for(lent.is_set, what="the pool has a connection")
        if asked in ("payload", "start"):
            proxy.hold()
        if asked == "async":
            with connect() as connection:
                enqueue_timed(connection)
        gate.set()
        wait_for(
            lambda: "snoozed" in [fields["outcome"] for _, fields in ran],
            what="it is put off",
        )
        proxy.release()
        wait_for(lambda: count(url) == 0, timeout=40, what="all have run")
    assert attempts(url) == {("completed", 1)}


@pytest.mark.expects("loop.failed", "fenced")
@pytest.mark.guarantee("FP19")
def test_a_stop_waits_for_no_answer_of_the_database_when_no_job_runs(
    url, proxy, wait_for, monkeypatch
):
    monkeypatch.setattr("jobs_lib.postgres.database._CONNECT_WITHIN", 2)
    app = make_app(
        proxy.url(url), database_timeout=1, stale_after=60, shutdown_timeout=3_600
    )

    @app.job()
    def work(job) -> None: ...

    service = Service(app, ["executor"])
    service.start()
    try:
        with heard("loop.failed") as failed:
            proxy.hold()
            wait_for(
                lambda: any(fields["loop"] == "executor" for _, fields in failed),
                what="the database is missed",
            )
    finally:
        # If it waited, the test's own limit of time would end it.
        assert service.stop()


def connected_as(admin, name: str, wait: str = "") -> int:
    """How many connections of this name there are, which wait for such a thing.

    One of which the client may not know yet that it is let in does not count.
    """
    return admin.execute(
        "select from pg_stat_activity where application_name like %s and query <> ''"
        " and coalesce(wait_event_type, '') like %s and datname = current_database()",
        (f"jobs_lib {name}%", wait or "%"),
    ).rowcount


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP19")
def test_the_watch_of_lags_notices_a_silent_database_and_stops(
    url, admin, proxy, wait_for
):
    admin.execute(
        "insert into jobs_lib.reexports (entity, topic, rate, lag_group, lag_limit)"
        " values ('e', 'states', 60, 'g', 1)"
    )
    app = make_app(
        proxy.url(url), database_timeout=1, kafka_bootstrap_servers="127.0.0.1:9"
    )
    watch = LagWatch(app.database(), app.settings)
    watch.start()
    try:
        wait_for(lambda: connected_as(admin, "re-export lag"), what="it looks")
        with heard("loop.failed") as failed:
            proxy.hold()
            wait_for(
                lambda: any("no answer" in str(one["error"]) for _, one in failed),
                what="the database is missed",
            )
        # If it waited, the test's own limit of time would end it.
        watch.stop()
    finally:
        proxy.release()
        watch.stop()


def test_a_command_ends_when_the_database_is_silent(url, proxy, monkeypatch):
    monkeypatch.setattr(session, "STATEMENT_SECONDS", 1.0)
    database = make_app(proxy.url(url), database_timeout=1).database()
    with database.connect("test") as connection:
        with session.bounded(connection, database):
            connection.execute("select 1")
        proxy.hold()
        # If it waited, the test's own limit of time would end it.
        with (
            pytest.raises(psycopg.OperationalError, match="no answer"),
            session.bounded(connection, database),
        ):
            connection.execute("select 1")
    proxy.release()


@pytest.fixture
def run(url, proxy, monkeypatch, capsys) -> Iterator[Callable[..., str]]:
    """`run("jobs", "list")` returns the line with which a command fails."""
    monkeypatch.setattr(session, "STATEMENT_SECONDS", 0.0)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", proxy.url(url))
    monkeypatch.setenv("JOBS_LIB_DATABASE_TIMEOUT", "1")

    def run(*words: str) -> str:
        _, told = fail_command(monkeypatch, capsys, *words)
        return told.strip()

    yield run
    default_settings.cache_clear()


@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize("words", ["jobs list", "check", "migrate"])
def test_a_command_ends_if_the_database_says_nothing_after_the_login(proxy, run, words):
    proxy.mute(1)
    # If it waited, the test's own limit of time would end it.
    line = run(*words.split())
    assert line.startswith("error: the database at ")
    assert "does not answer: no answer within 1 s" in line


@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize(
    "ask",
    [
        lambda app: check_version(app.database()),
        lambda app: read_installation(app.database()),
        lambda app: find_role(app.database(), "test", [], 5.0),
        lambda app: declare_topic(app, "orders", partitions=3),
        lambda app: retry(app.database()),
        lambda app: delete_discarded(app.database()),
        lambda app: list_latest(app.database()),
        lambda app: place_tables(app),
    ],
    ids=["check", "start", "role", "home", "retry", "delete", "reexport", "models"],
)
def test_the_first_question_to_a_database_that_says_nothing_fails(
    url, proxy, monkeypatch, ask
):
    monkeypatch.setattr(session, "STATEMENT_SECONDS", 0.0)
    monkeypatch.setattr("jobs_lib.reexport.control._WITHIN", 1.0, raising=False)
    app = make_app(proxy.url(url), database_timeout=1)

    @app.read_model("orders", table="model", key="id", group="g")
    def to_row(record: Record) -> dict[str, object]:
        return {}

    # It answers to the login, and to what settles the session.
    proxy.mute(2)
    # If it waited, the test's own limit of time would end it.
    with pytest.raises(psycopg.OperationalError, match="no answer within 1 s"):
        ask(app)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize("answers", [1, 2])
def test_a_start_that_a_silent_database_holds_up_can_be_stopped(
    url, proxy, wait_for, answers
):
    proxy.mute(answers)
    service = Service(make_app(proxy.url(url), database_timeout=1), ["executor"])
    start = threading.Thread(target=service.start)
    with heard("loop.failed") as failed:
        start.start()
        wait_for(lambda: failed, what="the database is missed")
        service.ask_to_stop()
        # If it waited, the test's own limit of time would end it.
        start.join()
    assert failed[0][1]["loop"] == "start"
    assert service.stop()


def test_a_pool_can_be_used_again_after_a_database_that_said_nothing(
    url, proxy, wait_for, monkeypatch
):
    monkeypatch.setattr("jobs_lib.callers.pools._WAIT", 1.0)
    app = make_app(proxy.url(url), database_timeout=1)
    proxy.mute(1)
    with pytest.raises(UnavailableError), app.transaction():
        pass
    proxy.mute(None)

    def works() -> bool:
        with contextlib.suppress(UnavailableError), app.transaction():
            return True
        return False

    wait_for(works, what="the pool has a connection")
    app.close()


@pytest.fixture
def maintenance(url, admin, proxy, connect, wait_for) -> Iterator[Maintenance]:
    """Maintenance behind the proxy, in a step whose statement waits for a lock."""
    maintenance = Maintenance(make_app(proxy.url(url)).database(), [1])
    with connect() as holder:
        holder.execute("lock table jobs_lib.reexports")
        maintenance.start()
        try:
            wait_for(
                lambda: connected_as(admin, "maintenance", "Lock"), what="a step waits"
            )
            yield maintenance
        finally:
            holder.rollback()
            proxy.release()
            maintenance.stop()


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP19")
def test_a_stop_waits_for_no_answer_to_a_step_of_the_maintenance(maintenance, proxy):
    proxy.hold()
    # If it waited, the test's own limit of time would end it.
    maintenance.stop()


@pytest.mark.expects("loop.failed")
def test_maintenance_notices_a_silent_database(monkeypatch, request, proxy, wait_for):
    monkeypatch.setattr("jobs_lib.postgres.database._UPKEEP_WITHIN", 4, raising=False)
    request.getfixturevalue("maintenance")
    with heard("loop.failed") as failed:
        proxy.hold()
        wait_for(
            lambda: any("no answer" in str(one["error"]) for _, one in failed),
            what="the database is missed",
        )
