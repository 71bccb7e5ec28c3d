"""The reasons of a job that only other jobs keep waiting: workers and limits."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
from psycopg.types.json import Jsonb

from jobs_lib import Job, Workers
from jobs_lib.operating import explain, explanation
from jobs_lib.postgres.database import Database
from tests.operating.helpers import add_job, add_owner
from tests.support.apps import HOME, executing, make_app
from tests.support.roles import as_role

if TYPE_CHECKING:
    from jobs_lib.ownership.process import Process


@pytest.fixture
def app(database_url):
    """An app on the test's database."""
    return make_app(database_url)


@pytest.fixture
def await_reason(app, wait_for):
    """A function that waits until a job has a reason, and returns the reason's text."""

    def await_reason(job_id: int, code: str) -> str:
        found: list[str] = []

        def look() -> bool:
            reasons = explain(app.database(), job_id, stale_after=60).reasons
            found[:] = [reason.text for reason in reasons if reason.code == code]
            return bool(found)

        wait_for(look, what=f"job {job_id} is {code}")
        return found[0]

    return await_reason


def find_running(process: Process, count: int) -> set[int]:
    """The jobs that keep all workers busy, if there are so many of them."""
    told = [{job["id"] for job in one["jobs"]} for one in process.report()]
    return next((jobs for jobs in told if len(jobs) == count), set())


@pytest.mark.guarantee("J24")
def test_a_job_waits_since_all_workers_are_busy(
    app, connect, gate, wait_for, await_reason
):
    @app.job(workers=Workers(2, "reports"))
    def report(job: Job) -> None:
        gate.wait(60)

    @app.job()
    def other(job: Job) -> None: ...

    with connect() as connection:
        ids = [report.enqueue(connection) for _ in range(40)]
    with executing(app, HOME) as process:
        begun = wait_for(lambda: find_running(process, 2), what="two jobs run")
        # Any two of them may be the first: the origins have no order.
        text = await_reason(max({*ids} - begun), "workers_busy")
        found = re.fullmatch(
            r"all 2 workers of pod (\S+) that it could run on are busy with "
            r"job (\d+) \(report\) since 20[^,]+, job (\d+) \(report\) since 20[^,]+",
            text,
        )
        assert found
        assert found[1] == process.pod
        assert {int(found[2]), int(found[3])} == begun
        # A running job has no reason to wait.
        for job_id in begun:
            codes = explain(app.database(), job_id, stale_after=60).codes
            assert codes == ["running"]
        gate.set()


@pytest.mark.guarantee("J24")
@pytest.mark.parametrize("is_async", [False, True])
def test_workers_are_busy_also_when_no_claimed_job_waits(
    app, connect, gate, wait_for, is_async
):
    def report(job: Job) -> None:
        gate.wait(60)

    async def report_async(job: Job) -> None:
        await asyncio.to_thread(gate.wait, 60)

    handler = report_async if is_async else report
    declared = app.job(workers=Workers(2, "reports"), name="report")(handler)
    with executing(app, HOME) as process:
        assert process.report() == []
        with connect() as connection:
            ids = [declared.enqueue(connection) for _ in range(2)]
        # What waits now is not claimed: it was released, or comes later.
        begun = wait_for(lambda: find_running(process, 2), what="both run")
        assert begun == {*ids}
        (busy,) = process.report()
        assert (busy["types"], busy["workers"]) == (["report"], 2)
        gate.set()
        wait_for(lambda: process.report() == [], what="they are idle again")


@pytest.mark.guarantee("J24")
@pytest.mark.parametrize("limit", [1, (1, "tenant")])
def test_a_job_waits_for_its_limit(
    app, database_url, connect, gate, wait_for, await_reason, limit
):
    begun: list[int] = []

    @app.job(limit=limit)
    def call(job: Job, tenant: str) -> None:
        begun.append(job.id)
        gate.wait(60)

    with connect() as connection:
        ids = [call.enqueue(connection, tenant="t") for _ in range(3)]
    with executing(app, HOME) as process:
        wait_for(lambda: begun, what="one runs")
        waiting = max({*ids} - {*begun})
        text = await_reason(waiting, "limited")
        each = " for each tenant" if isinstance(limit, tuple) else ""
        assert text == (
            f"'call' runs 1 at once{each} over all pods, and that many run: "
            f"on {process.pod}"
        )
        codes = explain(app.database(), waiting, stale_after=60).codes
        assert codes.count("limited") == 1
        # A role that only reads is not refused, whatever it may not read.
        reader = Database(as_role(database_url, "read"))
        found = explain(reader, waiting, stale_after=60)
        (told,) = [one.text for one in found.reasons if one.code == "limited"]
        assert told == (
            "'call' runs 1 at once for each tenant over all pods: whether that many "
            "run is not known to this role, which may not read the payload"
            if isinstance(limit, tuple)
            else text
        )
        gate.set()


def test_no_transaction_is_open_while_kafka_is_asked(
    app, database, connect, monkeypatch
):
    admin = connect(autocommit=True)
    owner = add_owner(admin, types=["work"])
    (source,) = admin.execute(
        "insert into jobs_lib.sources (consumer_group, topic, partition)"
        " values ('flights', 'flights', 2) returning id"
    ).fetchone()
    job = add_job(admin, source=source, record_offset=7)
    after = [["flights", group, True] for group in ("first", "second")]
    busy = Jsonb([{"types": ["work"], "after": after}])
    admin.execute(
        "update jobs_lib.processes set busy = %s where id = %s", (busy, owner)
    )
    asked: list[tuple[object, ...]] = []

    def ask(_, *dependency):
        asked.append(dependency)
        states = "select state from pg_stat_activity where application_name = %s"
        assert admin.execute(states, ["jobs_lib explain"]).fetchall() == [("idle",)]
        group = dependency[0][1]
        return f"{group} is behind" if group == "second" else None

    monkeypatch.setattr(explanation, "explain_wait", ask)
    found = explain(database, job, stale_after=60, settings=app.settings)
    assert found.codes == ["gated"]
    assert found.reasons[0].text.endswith("second is behind")
    assert asked == [(("flights", group), (2, 7)) for group in ("first", "second")]
