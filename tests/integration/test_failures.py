"""A failed attempt shows in the log, with its traceback, and with the job."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from jobs_lib import Discard, Job, exponential, operating
from tests.support.apps import HOME, count, executing, heard

AT_ONCE = exponential(first=0.001, cap=0.001, max_attempts=12)


def fail_deep(n: int) -> None:
    raise LookupError(f"no partner {n}\nERROR forged")


def lines(caplog, event: str) -> list[Any]:
    """The log's records of an event."""
    return [r for r in caplog.records if getattr(r, "event", None) == event]


def test_a_failed_attempt_is_one_warning_with_its_traceback(
    app, admin, connect, wait_for, caplog
):
    @app.job(name="failing_once", group="g", retry=exponential(first=3600, cap=3600))
    def charge(job: Job, g: str) -> None:
        fail_deep(7)

    with connect() as connection:
        job_id = charge.enqueue(connection, g="ada")
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(lambda: failed, what="it has failed")
    (record,) = lines(caplog, "job.failed")
    assert record.levelno == logging.WARNING
    fields = record.fields
    assert 0 <= fields.pop("retry_in") <= 3600
    assert fields == {
        "type": "failing_once",
        "id": job_id,
        "group": "ada",
        "attempt": 1,
        "error": "LookupError: no partner 7\\nERROR forged",
        "outcome": "retried",
    }
    first, *trace = (
        logging.Formatter("%(levelname)s %(message)s").format(record).split("\n")
    )
    start = f"WARNING job.failed type=failing_once id={job_id} group=ada attempt=1 "
    assert first.startswith(start + "error=LookupError: no partner 7\\nERROR forged ")
    assert all(line.startswith("    ") for line in trace)
    # The trace has the handler and its calls, and not the callers of the handler.
    frames = [line for line in trace if "File " in line]
    assert [frame.split()[-1] for frame in frames] == ["charge", "fail_deep"]
    assert "no partner 7" in trace[-2] + trace[-1]


def test_the_newest_error_alone_keeps_its_traceback(app, admin, connect, wait_for):
    @app.job(name="failing_often", retry=AT_ONCE)
    def charge(job: Job) -> None:
        if job.attempt < 12:
            fail_deep(job.attempt)
        raise Discard("enough")

    with connect() as connection:
        job_id = charge.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 1, what="it was discarded")
    shown: Any = operating.show_job(app.database(), job_id)
    assert [error["attempt"] for error in shown.errors] == [*range(2, 13)]
    *before, last = shown.errors
    assert not [error for error in before if "trace" in error]
    assert 'raise Discard("enough")' in last["trace"]


def test_a_waiting_job_keeps_the_traceback_of_its_last_failure(
    app, admin, connect, wait_for
):
    @app.job(name="failing_for_ever", retry=exponential(first=0.001, cap=0.001))
    def charge(job: Job) -> None:
        fail_deep(job.attempt)

    with connect() as connection:
        job_id = charge.enqueue(connection)

    def shown() -> list[Any]:
        found = operating.show_job(app.database(), job_id)
        return (found and found.errors) or []

    with executing(app, HOME):
        wait_for(
            lambda: shown() and shown()[-1]["attempt"] > 12, what="it has failed often"
        )
    *before, last = shown()
    assert not [error for error in before if "trace" in error]
    assert "fail_deep" in last["trace"]
    assert [e["attempt"] for e in (*before, last)] == [
        *range(last["attempt"] - 9, last["attempt"] + 1)
    ]


@pytest.mark.guarantee("O5")
def test_many_failures_of_one_kind_are_few_lines(app, admin, connect, wait_for, caplog):
    @app.job(name="failing_alike", retry=1)
    def charge(job: Job, n: int) -> None:
        if n == 0:
            raise KeyError("another kind")
        fail_deep(n)

    with connect() as connection:
        charge.enqueue_many(connection, [{"n": n} for n in range(50)])
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 50, what="all have failed")
        wait_for(lambda: len(failed) == 50, what="each is an event")
    told = lines(caplog, "job.failed")
    alike = [r for r in told if "LookupError" in r.fields["error"]]
    assert len(told) == len(alike) + 1 == 11
    # Workers log side by side: the first failure by count may not be the first in the
    # log.
    assert sum(bool(r.exc_text) for r in alike) == 1
    (last,) = [r for r in alike if "more" in r.fields]
    assert last.getMessage().endswith("more=left out for 10 s")


def test_failures_that_no_handler_raised_are_logged_too(
    app, admin, connect, wait_for, caplog
):
    @app.job(retry=1, time_limit=0.05)
    async def slow(job: Job) -> None:
        await asyncio.sleep(60)

    @app.job(retry=1)
    def crashed(job: Job) -> None: ...

    @app.job()
    def misfit(job: Job, n: int) -> None: ...

    with connect() as connection:
        slow.enqueue(connection)
        crashed.enqueue(connection)
        misfit.enqueue(connection, n=1)
    admin.execute("update jobs_lib.jobs set crashes = 3 where type = 'crashed'")
    admin.execute("update jobs_lib.jobs set payload = '{}' where type = 'misfit'")
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(lambda: len(failed) >= 3, what="all have failed")
    told = {r.fields["type"]: r for r in lines(caplog, "job.failed")}
    assert told["slow"].fields["error"] == "the time limit of 0.05 s is over"
    assert told["slow"].fields["outcome"] == "discarded"
    assert "died 3 times" in told["crashed"].fields["error"]
    assert told["crashed"].fields["outcome"] == "discarded"
    assert told["misfit"].fields["outcome"] == "snoozed"
    assert told["misfit"].exc_text is None


@pytest.mark.parametrize("is_async", [False, True])
def test_starts_and_ends_are_logged_at_debug_level(
    app, admin, connect, wait_for, caplog, is_async
):
    if is_async:

        @app.job()
        async def work(job: Job) -> None: ...
    else:

        @app.job()
        def work(job: Job) -> None: ...

    caplog.set_level(logging.DEBUG, logger="jobs_lib")
    with connect() as connection:
        job_id = work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="it ran")
    (start,) = lines(caplog, "job.started")
    (end,) = lines(caplog, "job.ran")
    assert start.fields == {"type": "work", "id": job_id, "group": None, "attempt": 1}
    assert end.fields.pop("seconds") >= 0
    assert end.fields == {**start.fields, "outcome": "completed", "error": None}


def test_starts_and_ends_are_not_logged_at_info_level(
    app, admin, connect, wait_for, caplog
):
    @app.job()
    def work(job: Job) -> None: ...

    caplog.set_level(logging.INFO, logger="jobs_lib")
    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="it ran")
    assert lines(caplog, "job.started") == lines(caplog, "job.ran") == []
