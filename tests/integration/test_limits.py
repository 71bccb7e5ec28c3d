"""A limit bounds the jobs of a type or value that run at once over all processes."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest

from jobs_lib import ConfigurationError, Job, Rate
from jobs_lib.operating.explanation import explain
from tests.operating.helpers import add_owner
from tests.support.apps import HOME, count, executing, make_app


class Runs:
    """The jobs that run now, and the most that ever ran at once, by value."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.ended = 0
        self.order: list[object] = []
        self._lock = threading.Lock()

    @contextmanager
    def run(self, value: str = "", note: object = None):
        """Count a handler while it runs."""
        with self._lock:
            self.now[value] += 1
            self.most[value] = max(self.most[value], self.now[value])
            self.order.append(note)
        try:
            yield
        finally:
            with self._lock:
                self.now[value] -= 1
                self.ended += 1


@pytest.fixture
def runs():
    """The runs of a test's handlers."""
    return Runs()


@contextmanager
def two(app, **kwargs):
    """Two processes that share the origins."""
    with ExitStack() as stack:
        for share in (HOME[::2], HOME[1::2]):
            stack.enter_context(executing(app, share, **kwargs))
        yield


@pytest.mark.guarantee("J31")
def test_no_more_jobs_of_a_type_run_at_once_than_its_limit(
    app, admin, connect, wait_for, runs
):
    @app.job(limit=3)
    def call(job: Job, n: int) -> None:
        with runs.run(note=n):
            time.sleep(0.01)

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(100)])
    with two(app):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert sorted(runs.order) == list(range(100))
    assert runs.most[""] == 3


@pytest.mark.guarantee("J31")
def test_no_more_jobs_of_a_value_run_at_once_than_its_limit(
    app, admin, connect, wait_for, runs
):
    @app.job(limit=(2, "tenant"))
    def call(job: Job, tenant: str) -> None:
        with runs.run(tenant):
            time.sleep(0.01)

    with connect() as connection:
        payloads = [{"tenant": f"t{n % 4}"} for n in range(160)]
        call.enqueue_many(connection, payloads)
    with two(app):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.ended == 160
    assert dict(runs.most) == {f"t{n}": 2 for n in range(4)}


@pytest.mark.guarantee("J31")
def test_a_value_that_no_index_could_hold_has_its_limit(
    app, database, admin, connect, wait_for, runs, gate
):
    long = secrets.token_urlsafe(4_000)

    @app.job(limit=(1, "url"))
    def call(job: Job, url: str, more: str = "") -> None:
        with runs.run(url):
            if url == long:
                gate.wait(60)

    short = [{"url": f"https://{n}.example"} for n in range(10)]
    with connect() as connection:
        # The same value in a payload that is stored elsewhere, and in one that is not.
        call.enqueue_many(
            connection, [{"url": long}, {"url": long, "more": "x" * 10**6}, *short]
        )
    rows = admin.execute("select id from jobs_lib.jobs order by id limit 2").fetchall()
    with two(app):
        wait_for(lambda: runs.ended == 10, what="jobs of all other values have ended")
        wait_for(lambda: runs.now[long] == 1, what="one of the long value runs")
        wait_for(
            lambda: any("limited" in explain(database, one).codes for (one,) in rows),
            what="the other one says what it waits for",
        )
        gate.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.most[long] == 1
    assert runs.ended == 12


def test_jobs_of_other_types_and_values_pass_those_that_wait_for_a_limit(
    app, admin, connect, wait_for, runs, gate
):
    ran: list[str] = []

    @app.job(limit=(1, "tenant"))
    def call(job: Job, tenant: str) -> None:
        if tenant == "large":
            with runs.run():
                gate.wait(60)
        else:
            ran.append(tenant)

    @app.job()
    def other(job: Job) -> None:
        ran.append("other")

    small = [f"small {n}" for n in range(300)]
    with connect() as connection:
        call.enqueue_many(connection, [{"tenant": "large"}] * 5_000)
        call.enqueue_many(connection, [{"tenant": name} for name in small])
        for _ in range(20):
            other.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: len(ran) == 320, what="all others have run")
        assert sorted(ran) == sorted([*small, *["other"] * 20])
        wait_for(lambda: runs.now[""] == 1, what="one of the large runs")
        gate.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.ended == 5_000
    assert runs.most[""] == 1


def test_two_processes_take_turns_with_a_single_slot(
    app, admin, connect, wait_for, runs
):
    @app.job(limit=1)
    def call(job: Job, n: int) -> None:
        with runs.run(note=job.origin):
            time.sleep(0.02)

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(120)])
    with two(app):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.most[""] == 1
    assert runs.ended == 120
    # Each had its turn before the other had run all of its jobs.
    turns = [HOME.index(str(origin)) % 2 for origin in runs.order]
    assert sum(a != b for a, b in pairwise(turns)) >= 2


def test_a_limit_counts_async_handlers_and_groups(app, admin, connect, wait_for, runs):
    @app.job(limit=2)
    async def fetch(job: Job, n: int) -> None:
        with runs.run("fetch"):
            await asyncio.sleep(0.01)

    @app.job(limit=2, group="key")
    def book(job: Job, key: str, n: int) -> None:
        with runs.run("book", note=(key, n)):
            time.sleep(0.005)

    with connect() as connection:
        fetch.enqueue_many(connection, [{"n": n} for n in range(60)])
        payloads = [{"key": f"k{n % 5}", "n": n} for n in range(100)]
        book.enqueue_many(connection, payloads)
    with two(app):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.most["fetch"] == 2
    assert runs.most["book"] <= 2
    booked = [note for note in runs.order if note]
    for key in {key for key, _ in booked}:
        numbers = [n for one, n in booked if one == key]
        assert numbers == sorted(numbers)


def test_a_group_in_which_values_change_keeps_its_order_and_the_limit(
    app, admin, connect, wait_for, runs
):
    @app.job(limit=(1, "tenant"), group="key")
    def book(job: Job, key: str, tenant: str, n: int) -> None:
        with runs.run(tenant, note=(key, n)):
            time.sleep(0.002)

    with connect() as connection:
        payloads = [
            {"key": f"k{n % 7}", "tenant": f"t{n % 3}", "n": n} for n in range(210)
        ]
        book.enqueue_many(connection, payloads)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert max(runs.most.values()) == 1
    for key in {f"k{n}" for n in range(7)}:
        numbers = [note[1] for note in runs.order if note[0] == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 30


def test_failed_jobs_free_their_slot(app, admin, connect, wait_for, runs):
    @app.job(limit=1, retry=3)
    def call(job: Job, n: int) -> None:
        with runs.run(note=n):
            if job.attempt < 2:
                raise ValueError("not yet")

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(10)])
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.ended == 20
    assert runs.most[""] == 1


def test_a_job_past_its_time_limit_frees_its_slot(app, admin, connect, wait_for, gate):
    ran: list[int] = []

    @app.job(limit=1, time_limit=0.2, retry=1)
    def call(job: Job, n: int) -> None:
        ran.append(n)
        if n == 0:
            gate.wait(30)

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(3)])
    with executing(app, HOME):
        wait_for(lambda: len(ran) == 3, what="the others have run")
        gate.set()


def test_a_process_that_ends_leaves_no_slot(app, admin, connect, wait_for, runs):
    @app.job(limit=2)
    def call(job: Job, n: int) -> None:
        with runs.run():
            pass

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(20)])
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert count(admin, "slots") == 0


@pytest.mark.guarantee("J31")
def test_the_slots_of_a_dead_process_are_free_once_it_counts_as_dead(
    app, admin, connect, wait_for, runs
):
    @app.job(limit=1)
    def call(job: Job) -> None:
        with runs.run():
            pass

    dead = add_owner(admin, origin="elsewhere/0", silent=60)
    admin.execute(
        "insert into jobs_lib.slots (type, value, slot, owner) values ('call','',1,%s)",
        (dead,),
    )
    with connect() as connection:
        call.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: runs.ended == 1, what="it has run")


@pytest.mark.guarantee("J31")
def test_a_living_process_keeps_its_slot_while_its_job_runs(
    database_url, admin, connect, wait_for, runs, gate
):
    # A busy machine may need a second for a heartbeat.
    app = make_app(database_url, stale_after=3.0)

    @app.job(limit=1)
    def call(job: Job, n: int) -> None:
        with runs.run(note=n):
            gate.wait(60)

    with connect() as connection:
        for n, origin in enumerate((HOME[0], HOME[1])):
            call.options(origin=origin).enqueue(connection, n=n)
    with two(app):
        wait_for(lambda: runs.now[""] == 1, what="one runs")
        wait_for(
            lambda: admin.execute(
                "select bool_or(wanted) from jobs_lib.slots"
            ).fetchone()[0],
            what="the other process waits for the slot",
        )
        # This is longer than the silence after which a process counts as dead.
        time.sleep(app.settings.stale_after * 1.5)
        assert len(runs.order) == 1
        gate.set()
        wait_for(lambda: runs.ended == 2, what="both have run")
    assert runs.most[""] == 1


@pytest.mark.guarantee("J31")
def test_slots_that_were_taken_from_a_process_do_not_count_for_it(
    app, admin, connect, wait_for, runs, gate
):
    """Act like processes that took it for dead after the server's clock was set."""

    @app.job(limit=1)
    def call(job: Job, n: int) -> None:
        with runs.run(note=n):
            if n == 0:
                gate.wait(30)

    with connect() as connection:
        call.enqueue(connection, n=0)
    with executing(app, HOME):
        wait_for(lambda: runs.now[""] == 1, what="one runs")
        # Every other process takes this one for alive for another hour.
        other = add_owner(admin, origin="elsewhere/0", silent=-3_600)
        admin.execute("update jobs_lib.slots set owner = %s, wanted = false", (other,))
        time.sleep(0.5)  # five looks at the slots
        gate.set()
        wait_for(lambda: runs.ended == 1, what="it has ended")
        with connect() as connection:
            call.enqueue(connection, n=1)
        wait_for(
            lambda: admin.execute(
                "select bool_or(wanted) from jobs_lib.slots"
            ).fetchone()[0],
            what="the slot is asked for",
        )
        assert runs.order == [0]
        admin.execute("delete from jobs_lib.slots")
        wait_for(lambda: runs.ended == 2, what="both have run")


def test_a_limit_holds_for_null_and_numeric_values(app, admin, connect, wait_for, runs):
    @app.job(limit=(1, "tenant"))
    def call(job: Job, tenant: int | None) -> None:
        with runs.run(repr(tenant)):
            time.sleep(0.005)

    with connect() as connection:
        payloads = [{"tenant": (None, 1, 2)[n % 3]} for n in range(60)]
        call.enqueue_many(connection, payloads)
    with two(app):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert dict(runs.most) == {"None": 1, "1": 1, "2": 1}


def test_a_type_has_a_limit_and_a_rate(app, admin, connect, wait_for, runs):
    @app.job(limit=1, rate=Rate(200))
    def call(job: Job, n: int) -> None:
        with runs.run(note=n):
            pass

    with connect() as connection:
        call.enqueue_many(connection, [{"n": n} for n in range(50)])
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert runs.ended == 50
    assert runs.most[""] == 1


@pytest.mark.parametrize(
    "given", [0, -1, 1.5, "4", True, 1_001, (2,), (0, "tenant"), (2, 3), ("tenant", 2)]
)
def test_an_invalid_limit_is_refused(app, given):
    with pytest.raises(ConfigurationError, match="the limit of 'call' is"):

        @app.job(limit=given)
        def call(job: Job, tenant: str) -> None: ...


@pytest.mark.parametrize("parameter", ["tenants", "amount"])
def test_a_limit_by_an_unknown_or_float_parameter_is_refused(app, parameter):
    with pytest.raises(ConfigurationError, match=f"limit of 'call'.*'{parameter}'"):

        @app.job(limit=(2, parameter))
        def call(job: Job, tenant: str, amount: float) -> None: ...


def test_a_limit_by_a_parameter_with_a_value_as_default_is_refused(app):
    @app.job(limit=(2, "tenant"))
    def fetch(job: Job, tenant: str | None = None) -> None: ...

    with pytest.raises(ConfigurationError, match="'tenant', whose default is 'acme'"):

        @app.job(limit=(2, "tenant"))
        def call(job: Job, tenant: str = "acme") -> None: ...
