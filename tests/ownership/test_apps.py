"""Several apps share the same tables: each runs the jobs of the types that it knows."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import Cancel, operating
from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import ConfigurationError, FencedError
from jobs_lib.operating.checks import check
from jobs_lib.operating.home_topic import repartition
from jobs_lib.ownership import Process
from jobs_lib.ownership.apps import find_role
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.service.service import Service
from tests.operating.helpers import add_claim, add_owner
from tests.support.apps import count, heard, running
from tests.support.apps import make_app as make_quick_app

if TYPE_CHECKING:
    from jobs_lib import App, Job

pytestmark = pytest.mark.expects("fenced")


def make_app(url: str, **settings: Any) -> App:
    """An app whose pods never count as dead, so that a busy machine adds no run."""
    return make_quick_app(url, **{"stale_after": 20.0, **settings})


def make_pod(
    url: str, *types: str, name: str = "test", **settings: Any
) -> tuple[App, list[str]]:
    app = make_app(url, name=name, **settings)
    ran: list[str] = []

    def declare(of: str) -> None:
        @app.job(name=of, group="customer")
        def work(job: Job, customer: str | None = None, n: int = 0) -> None:
            ran.append(of)

    for of in types:
        declare(of)
    return app, ran


def enqueue(app: App, connect, each: int = 20) -> None:
    with connect() as connection:
        for job_type in app.jobs.values():
            for _ in range(each):
                job_type.enqueue(connection)


def find_errors(app: App, kind: str) -> list[str]:
    return [
        one.what
        for one in check(app.database(), app.settings)
        if one.level == "error" and one.check == kind
    ]


@pytest.mark.guarantee("J40")
def test_two_apps_run_the_jobs_of_their_own_types(
    database_url, admin, connect, wait_for
):
    one, ran_one = make_pod(database_url, "a", name="billing")
    two, ran_two = make_pod(database_url, "b", name="shipping")
    enqueue(one, connect)
    enqueue(two, connect)
    with (
        heard("jobs.unknown") as unknown,
        running(one, "executor") as first,
        running(two, "executor") as second,
    ):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="all have run")
        assert (ran_one, ran_two) == (["a"] * 20, ["b"] * 20)
        roles = [first.process.role, second.process.role]
        assert roles == ["execute", "execute:shipping"]
        wait_for(lambda: second.process.foreign == {"a"}, what="it knows the others")
        wait_for(lambda: first.process.foreign == {"b"}, what="it knows the others")
        told = len(unknown)
        # From now on, jobs of the other app are no reason to look.
        enqueue(one, connect)
        enqueue(two, connect)
        wait_for(lambda: len(ran_one) + len(ran_two) == 80, what="these run, too")
        assert len(unknown) == told
    assert (len(ran_one), len(ran_two)) == (40, 40)


@pytest.mark.guarantee("J40")
def test_a_group_of_two_apps_is_one_line(database_url, admin, connect, wait_for):
    one = make_app(database_url, name="billing")
    two = make_app(database_url, name="shipping")
    ran: list[int] = []

    def run(job: Job, customer: str, n: int) -> None:
        ran.append(n)

    bill = one.job(name="bill", group="customer")(run)
    ship = two.job(name="ship", group="customer")(run)
    with connect() as connection:
        for n in range(12):
            # Two jobs are of one app, and two of the other.
            (bill if n % 4 < 2 else ship).enqueue(connection, customer="7", n=n)
    with running(one, "executor"), running(two, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="all have run")
    assert ran == list(range(12))


@pytest.mark.guarantee("J40")
def test_a_delayed_or_failed_job_comes_back_to_its_app(
    database_url, admin, connect, wait_for
):
    one, ran_one = make_pod(database_url, "a", name="billing")
    two = make_app(database_url, name="shipping")
    attempts: list[int] = []

    @two.job(retry=5)
    def flaky(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise ConnectionError("down")

    with running(one, "executor"), running(two, "executor"):
        with connect() as connection:
            flaky.options(delay=0.3).enqueue(connection)
            one.jobs["a"].options(delay=0.3).enqueue(connection)
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="both have run")
    assert (attempts, ran_one) == ([1, 2, 3], ["a"])


@pytest.mark.guarantee("J40")
def test_due_jobs_are_left_to_their_own_app(database_url, admin, connect, wait_for):
    one, ran = make_pod(database_url, "a", name="billing")
    # It is alive, and has not yet seen that its job is due.
    add_owner(admin, types=["b"], role="execute:shipping", silent=-60)
    with running(one, "executor") as first:
        wait_for(lambda: first.process.foreign == {"b"}, what="it knows the other")
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload, state, run_at)"
            " select 'local/3', type, '{}', 'scheduled', now() + ahead"
            " from (values ('b', interval '-1 s'), ('b', '0.1 s'), ('a', '0.3 s'))"
            " as of(type, ahead)"
        )
        wait_for(lambda: ran == ["a"], what="its own job behind them runs")
    found = admin.execute("select type, state from jobs_lib.jobs").fetchall()
    assert found == [("b", "scheduled")] * 2


@pytest.mark.guarantee("J40")
def test_a_group_goes_on_in_the_other_app_after_a_long_job(
    database_url, admin, connect, wait_for, gate: threading.Event
):
    one = make_app(database_url, name="billing")
    two, ran = make_pod(database_url, "pack", "other", name="shipping")
    begun: list[int] = []

    @one.job(group="customer")
    def charge(job: Job, customer: str) -> None:
        begun.append(job.id)
        gate.wait()

    with (
        running(one, "executor"),
        running(two, "executor") as second,
        connect() as long,
    ):
        wait_for(lambda: second.process.foreign == {"charge"}, what="it knows both")
        # Nothing of this transaction is late, but nothing behind it is final, either.
        long.execute("select pg_current_xact_id()")
        with connect() as connection:
            charge.enqueue(connection, customer="7")
            two.jobs["pack"].enqueue(connection, customer="7")
        wait_for(lambda: begun, what="the first one runs")
        # A sweep after an ordinary commit looks back by two seconds.
        since = time.monotonic()
        while time.monotonic() < since + 4:
            with connect() as connection:
                two.jobs["other"].enqueue(connection, customer="8")
            wait_for(lambda: "pack" in ran or ran[-1:] == ["other"], what="it goes on")
            ran.clear()
        gate.set()
        wait_for(lambda: ran == ["pack"], timeout=30, what="the group goes on")


@pytest.mark.guarantee("J40")
def test_the_effect_of_a_job_commits_with_it_in_any_app(
    database_url, admin, connect, wait_for
):
    one, _ = make_pod(database_url, "a", name="billing")
    two = make_app(database_url, name="shipping")
    admin.execute("create table effects (n int)")

    @two.job()
    def effect(job: Job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s)", (n,))

    with connect() as connection:
        effect.enqueue_many(connection, [{"n": n} for n in range(20)])
    with running(one, "executor"), running(two, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="all have run")
    found = admin.execute("select n from effects order by n").fetchall()
    assert [n for (n,) in found] == list(range(20))


@pytest.mark.guarantee("J40")
def test_an_app_that_has_lost_an_origin_commits_nothing(
    database_url, admin, connect, wait_for
):
    find_role(make_app(database_url).database(), "billing", ["a"], 1.0)
    two = make_app(database_url, name="shipping")
    refused: list[BaseException] = []

    @two.job()
    def effect(job: Job) -> None:
        try:
            with job.transaction():
                if job.attempt == 1 and not refused:
                    admin.execute(
                        "update jobs_lib.origins set epoch = epoch + 1"
                        " where role = 'execute:shipping'"
                    )
        except FencedError as error:
            refused.append(error)
            raise

    with connect() as connection:
        effect.enqueue(connection)
    with heard("origins.lost") as lost, running(two, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="it runs again")
    assert len(refused) == 1
    assert {fields["role"] for _, fields in lost} == {"execute:shipping"}


@pytest.mark.guarantee("J40")
def test_the_check_fails_when_no_live_executor_knows_a_type(
    database_url, admin, connect, wait_for
):
    one, ran_one = make_pod(database_url, "a", name="billing")
    two, _ = make_pod(database_url, "b", name="shipping")
    enqueue(one, connect, each=1)
    enqueue(two, connect, each=1)
    with running(one, "executor"):
        wait_for(lambda: ran_one == ["a"], what="its job runs")
        (found,) = find_errors(one, "types")
        assert re.search("type b wait in .* no executor that is alive knows", found)
        # Its app is alive again, and only a pause holds the job back: all is well.
        admin.execute("insert into jobs_lib.pauses (kind, name) values ('type', 'b')")
        with running(two, "executor"):
            wait_for(
                lambda: not find_errors(one, "owners"), what="its origin has an owner"
            )
            assert find_errors(one, "types") == []


@pytest.mark.guarantee("J40")
def test_an_explanation_asks_the_owner_that_knows_the_type(
    database_url, admin, connect, wait_for
):
    one, _ = make_pod(database_url, "a", name="billing")
    two, _ = make_pod(database_url, "b", name="shipping")
    admin.execute("insert into jobs_lib.pauses (kind, name) values ('type', 'b')")
    with connect() as connection:
        job = two.jobs["b"].enqueue(connection, customer="7")

    def explain() -> list[str]:
        return operating.explain(two.database(), job).codes

    with running(one, "executor"):
        wait_for(lambda: explain() == ["paused", "unknown_type"], what="one is alive")
        with running(two, "executor"):
            wait_for(lambda: explain() == ["paused"], what="its own app is alive")


@pytest.mark.guarantee("J40")
def test_jobs_of_another_app_do_not_hold_up_jobs_behind_them(
    database_url, admin, connect, wait_for
):
    one, ran = make_pod(database_url, "a", name="billing")
    two, _ = make_pod(database_url, "b", name="shipping")
    admin.execute("insert into jobs_lib.pauses (kind, name) values ('type', 'b')")
    with running(two, "executor"), running(one, "executor") as first:
        wait_for(lambda: first.process.foreign == {"b"}, what="it knows the others")
        # There are so many jobs that looks at each find nothing behind them.
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload)"
            " select 'local/3', 'b', '{}' from generate_series(1, 100000)"
        )
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload, crashes)"
            " values ('local/3', 'a', '{}', 0), ('local/3', 'a', '{}', 2)"
        )
        wait_for(lambda: ran == ["a", "a"], timeout=30, what="both have run")


@pytest.mark.guarantee("J40")
def test_a_cancellation_waits_for_the_claims_of_every_app(
    database_url, admin, connect, wait_for
):
    two, _ = make_pod(database_url, "b", name="shipping")
    owner = add_owner(admin, types=["b"], role="execute:shipping")
    with connect() as connection:
        job = two.jobs["b"].options(origin="local/3").enqueue(connection)
    became: dict[int, str] = {}

    def cancel() -> None:
        became.update(operating.cancel(two.database(), [job]))

    thread = threading.Thread(target=cancel)
    with connect() as claiming:
        claiming.execute("select from jobs_lib.origins for share")
        thread.start()
        wait_for(
            lambda: (
                admin.execute(
                    "select from pg_stat_activity where wait_event_type = 'Lock'"
                    " and datname = current_database()"
                ).rowcount
            ),
            what="it waits for the claim",
        )
        add_claim(claiming, owner, job)
        claiming.commit()
    thread.join()
    assert became == {job: "requested"}


@pytest.mark.guarantee("J40")
def test_a_job_claimed_by_another_app_stays_available_behind_a_cancelled_head(
    database_url, admin, connect
):
    two, _ = make_pod(database_url, "b", name="shipping")
    owner = add_owner(admin, types=["b"], role="execute:shipping")
    with connect() as connection:
        # The head was committed late, while the job behind it was claimed already.
        head, behind = (
            two.jobs["b"].options(origin="local/3").enqueue(connection, customer="7")
            for _ in range(2)
        )
    add_claim(admin, owner, behind)
    assert operating.cancel(two.database(), [head]) == {head: "cancelled"}
    rows = admin.execute("select id, state from jobs_lib.jobs").fetchall()
    assert rows == [(behind, "available")]


@pytest.mark.guarantee("J40")
def test_a_running_job_of_any_app_is_asked_to_stop(
    database_url, admin, connect, wait_for, gate: threading.Event
):
    one, _ = make_pod(database_url, "a", name="billing")
    two = make_app(database_url, name="shipping")
    begun: list[int] = []

    @two.job()
    def long(job: Job) -> None:
        begun.append(job.id)
        while not job.cancel_requested and not gate.wait(0.01):
            pass
        raise Cancel("asked to")

    with connect() as connection:
        job_id = long.enqueue(connection)
    with running(one, "executor"), running(two, "executor"):
        wait_for(lambda: begun == [job_id], what="it runs")
        assert operating.cancel(two.database(), [job_id]) == {job_id: "requested"}
        wait_for(lambda: not count(admin, "jobs"), what="nothing is left")
    assert begun == [job_id]


@pytest.mark.guarantee("J40")
def test_a_group_goes_on_in_its_app_when_the_head_of_another_one_is_cancelled(
    database_url, admin, connect, wait_for
):
    one, _ = make_pod(database_url, "a", name="billing")
    two, ran = make_pod(database_url, "b", name="shipping")
    with connect() as connection:
        head = one.jobs["a"].enqueue(connection, customer="7")
        behind = two.jobs["b"].enqueue(connection, customer="7")
    with running(two, "executor"):
        wait_for(
            lambda: (
                operating.explain(two.database(), behind).codes == ["behind"]
                and count(admin, "origins")
            ),
            what="it stands behind the other",
        )
        assert operating.cancel(two.database(), [head]) == {head: "cancelled"}
        wait_for(lambda: ran == ["b"], what="it runs")


@pytest.mark.guarantee("J40")
def test_a_take_over_counts_the_crashes_of_its_own_app_alone(
    database_url, admin, connect, wait_for
):
    one, _ = make_pod(database_url, "a", name="billing")
    two = make_app(database_url, name="shipping")
    find_role(one.database(), "billing", ["a"], 1.0)
    attempts: list[int] = []

    @two.job()
    def ship(job: Job) -> None:
        attempts.append(job.attempt)

    with connect() as connection:
        job = ship.options(origin="local/3").enqueue(connection)
    dead = add_owner(
        admin, origin="local/3", types=["ship"], silent=60, role="execute:shipping"
    )
    add_claim(admin, dead, job)
    with running(one, "executor") as first:
        wait_for(lambda: first.process.foreign == {"ship"}, what="it has looked")
        assert admin.execute("select crashes from jobs_lib.jobs").fetchall() == [(0,)]
    with running(two, "executor"):
        # A server that has just started first gives dead processes time to beat.
        wait_for(
            lambda: attempts == [2], timeout=60, what="it runs again, a crash counted"
        )


@pytest.mark.guarantee("J40")
def test_another_count_of_partitions_fences_every_app(database_url, admin, connect):
    one, _ = make_pod(database_url, "a", name="billing")
    for role in ("execute", "execute:shipping"):
        add_owner(admin, origin="local/3", role=role)
    repartition(one, 7)
    found = admin.execute("select owner, epoch from jobs_lib.origins").fetchall()
    assert found == [(None, 8), (None, 8)]


@pytest.mark.guarantee("J40")
def test_types_that_another_app_runs_are_refused_with_the_way_out(
    database_url, admin, connect, wait_for
):
    one, ran = make_pod(database_url, "a", "b", name="billing", pod="pod-a")
    two, _ = make_pod(database_url, "b", "c", name="shipping")
    with running(one, "executor"):
        with (
            pytest.raises(
                ConfigurationError,
                match=r"pod 'pod-a' of the app 'billing' .* types b as well.*SCHEMA",
            ),
            running(two, "executor"),
        ):
            pass
        enqueue(one, connect)
        wait_for(lambda: len(ran) == 40, what="the first one goes on")
    assert not count(admin, "processes")
    # Once its executors are gone, another app may have the type.
    with running(two, "executor"):
        pass


@pytest.mark.guarantee("J40")
def test_a_start_that_is_refused_leaves_nothing_running(database_url, admin):
    port = free_port()
    one, _ = make_pod(database_url, "a", name="billing")
    two, _ = make_pod(database_url, "a", name="shipping", probes_port=port)
    with running(one, "executor"):
        before = {*threading.enumerate()}
        with pytest.raises(ConfigurationError, match="types a as well"):
            Service(two, ["executor"]).start()
        left = [t.name for t in {*threading.enumerate()} - before if t.is_alive()]
        assert not left
        assert count(admin, "processes") == 1
        # The port of the probes is free again.
        socket.create_server(("", port)).close()


@pytest.mark.guarantee("J40")
def test_an_app_of_the_same_name_with_other_types_is_refused_with_the_way_out(
    database_url, admin, connect, wait_for
):
    one, ran = make_pod(database_url, "a")
    two, ran_two = make_pod(database_url, "b")
    enqueue(one, connect)
    enqueue(two, connect)
    with running(one, "executor"):
        with (
            pytest.raises(ConfigurationError, match=r"\(a; here b\).*App\("),
            running(two, "executor"),
        ):
            pass
        wait_for(lambda: len(ran) == 20, what="its own jobs run")
    assert not count(admin, "processes")
    # Its jobs were not touched, and run as soon as the other app is gone.
    with running(two, "executor"):
        wait_for(lambda: len(ran_two) == 20, timeout=30, what="these run, too")


@pytest.mark.guarantee("J40")
def test_deployments_that_share_a_type_work_side_by_side(
    database_url, admin, connect, wait_for
):
    old, ran_old = make_pod(database_url, "a", "b")
    new, ran_new = make_pod(database_url, "b", "c")
    with (
        running(old, "executor") as before,
        heard("types.differ") as told,
        running(new, "executor"),
    ):
        enqueue(new, connect)
    assert [fields for _, fields in told] == [
        {"pod": before.process.pod, "unknown": ["a"], "own": ["c"]}
    ]
    with running(new, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="all have run")
    assert len(ran_old) + len(ran_new) == 40


@pytest.mark.guarantee("J40")
@pytest.mark.parametrize("types", [("a",), ("a", "b"), ("a", "b", "c")])
def test_a_release_with_more_or_fewer_types_is_not_reported(database_url, types):
    one, _ = make_pod(database_url, "a", "b")
    two, _ = make_pod(database_url, *types)
    with (
        running(one, "executor"),
        heard("types.differ") as told,
        running(two, "executor"),
    ):
        pass
    assert not told


@pytest.mark.parametrize(
    ("alive", "role"),
    [(None, "execute"), (["a", "old"], "execute"), (["x"], "execute:billing")],
    ids=["nobody", "its own", "another app's"],
)
def test_an_app_shares_origins_with_its_pods_of_an_earlier_release(
    database, alive, role
):
    # This is a release without apps: all its executors have the same role.
    old = Process(database, "old", [EXECUTE], 60.0, types=alive or ())
    if alive:
        old.start()
    try:
        assert find_role(database, "billing", ["a", "b"], 5.0) == role
        # It keeps the role through later runs, and no other app gets that role.
        assert find_role(database, "billing", ["x"], 5.0) == role
        assert find_role(database, "shipping", ["y"], 5.0) == "execute:shipping"
    finally:
        if alive:
            old.stop()
