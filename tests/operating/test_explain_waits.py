"""The reasons of a job that only other jobs keep waiting: workers and limits."""

from __future__ import annotations

import re

import pytest

from jobs_lib import Job, Workers
from jobs_lib.operating import explain
from jobs_lib.postgres.database import Database
from tests.support.apps import HOME, executing, make_app
from tests.support.roles import as_role


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


@pytest.mark.guarantee("J24")
def test_a_job_waits_since_all_workers_are_busy(app, connect, gate, await_reason):
    @app.job(workers=Workers(2, "reports"))
    def report(job: Job) -> None:
        gate.wait(60)

    @app.job()
    def other(job: Job) -> None: ...

    with connect() as connection:
        ids = [report.enqueue(connection) for _ in range(40)]
    with executing(app, HOME) as process:
        text = await_reason(ids[-1], "workers_busy")
        found = re.fullmatch(
            r"all 2 workers of pod (\S+) that it could run on are busy with "
            r"job (\d+) \(report\) since 20[^,]+, job (\d+) \(report\) since 20[^,]+",
            text,
        )
        assert found
        assert found[1] == process.pod
        running = {int(found[2]), int(found[3])}
        assert running < {*ids}
        # A running job has no reason to wait.
        for job_id in running:
            codes = explain(app.database(), job_id, stale_after=60).codes
            assert codes == ["running"]
        gate.set()


@pytest.mark.guarantee("J24")
@pytest.mark.parametrize("limit", [1, (1, "tenant")])
def test_a_job_waits_for_its_limit(
    app, database_url, connect, gate, await_reason, limit
):
    @app.job(limit=limit)
    def call(job: Job, tenant: str) -> None:
        gate.wait(60)

    with connect() as connection:
        ids = [call.enqueue(connection, tenant="t") for _ in range(3)]
    with executing(app, HOME) as process:
        text = await_reason(ids[-1], "limited")
        each = " for each tenant" if isinstance(limit, tuple) else ""
        assert text == (
            f"'call' runs 1 at once{each} over all pods, and that many run: "
            f"on {process.pod}"
        )
        codes = explain(app.database(), ids[-1], stale_after=60).codes
        assert codes.count("limited") == 1
        # A role that only reads is not refused, whatever it may not read.
        reader = Database(as_role(database_url, "read"))
        found = explain(reader, ids[-1], stale_after=60)
        (told,) = [one.text for one in found.reasons if one.code == "limited"]
        assert told == (
            "'call' runs 1 at once for each tenant over all pods: whether that many "
            "run is not known to this role, which may not read the payload"
            if isinstance(limit, tuple)
            else text
        )
        gate.set()
