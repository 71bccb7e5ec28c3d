"""Lists of jobs in every state, one job in full, and how much each reads."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime

import pytest

from jobs_lib.errors import OperatingError
from jobs_lib.operating import Filter, cancel, explain, list_jobs, show_job
from tests.operating.helpers import add_claim, add_discarded, add_job, add_owner
from tests.plans.test_plans import Plans, emptied, few_groups, full


def one_of_each(admin) -> dict[str, int]:
    """One job in each state; the ids by state."""
    running = add_job(admin)
    retried = add_job(admin, state="scheduled", run_at="2999-01-01")
    # The row of the claim still names a job that has been retried since.
    add_claim(admin, add_owner(admin), running, retried)
    ids = {
        "running": running,
        "scheduled": retried,
        "available": add_job(admin, group="g", type="mail"),
        "waiting": add_job(admin, group="g", origin="local/3"),
        "discarded": add_discarded(admin),
    }
    for state in ("completed", "cancelled", "superseded"):
        ids[state] = add_job(admin, origin="local/9")
        admin.execute("delete from jobs_lib.jobs where origin = 'local/9'")
        admin.execute(
            "insert into jobs_lib.history"
            " (keep_until, id, origin, type, outcome, attempt, enqueued_at)"
            " values (now(), %s, 'local/9', 'work', %s, 1, now())",
            (ids[state], state),
        )
    return ids


def test_each_state_lists_its_jobs(database, connect):
    ids = one_of_each(connect(autocommit=True))
    for state, job in ids.items():
        assert [(j.id, j.state) for j in list_jobs(database, state)] == [(job, state)]
        shown = show_job(database, job)
        assert shown is not None
        assert shown.state == state
    unfinished = [(j.id, j.state) for j in list_jobs(database)]
    assert unfinished == [
        (ids[state], state)
        for state in ("running", "scheduled", "available", "waiting")
    ]


def test_lists_are_filtered_and_paged(database, connect):
    admin = connect(autocommit=True)
    ids = one_of_each(admin)
    assert [j.id for j in list_jobs(database, filter=Filter(type="mail"))] == [
        ids["available"]
    ]
    assert len(list_jobs(database, filter=Filter(group="g"))) == 2
    assert list_jobs(database, filter=Filter(origin="local/4")) == []
    assert len(list_jobs(database, "running", Filter(origin="local/3"))) == 1
    assert list_jobs(database, "running", Filter(type="mail")) == []
    future = Filter(since=datetime(2999, 1, 1, tzinfo=UTC))
    assert list_jobs(database, "completed", future) == []
    more = [add_job(admin, origin=f"local/{n % 16}") for n in range(20)]
    pages, after = [], ids["waiting"]
    while page := list_jobs(database, after=after, limit=7):
        pages.append([job.id for job in page])
        after = page[-1].id
    assert [len(page) for page in pages] == [7, 7, 6]
    assert [job for page in pages for job in page] == more


def read_pages(database, state: str, limit: int = 7) -> list[list[int]]:
    """List all jobs of a state, page by page."""
    pages: list[list[int]] = []
    after = 0
    while page := list_jobs(database, state, after=after, limit=limit):
        pages.append([job.id for job in page])
        after = page[-1].id
        assert len(pages) < 10, pages
    return pages


@pytest.mark.parametrize("state", ["completed", "cancelled", "superseded"])
def test_finished_jobs_are_paged_from_the_newest_to_the_oldest(
    database, connect, state
):
    admin = connect(autocommit=True)
    # They end in another order than that of their ids, and some at the same time.
    admin.execute(
        "insert into jobs_lib.history (keep_until, id, origin, type, outcome, attempt,"
        " enqueued_at, finished_at)"
        " select now(), n, 'local/9', 'work', %s, 1, now(),"
        " now() - make_interval(secs => (n * 7 %% 20) / 2)"
        " from generate_series(1, 20) n",
        (state,),
    )
    rows = admin.execute(
        "select id from jobs_lib.history order by finished_at desc, id desc"
    )
    expected = [job for (job,) in rows]
    pages = read_pages(database, state)
    assert [len(page) for page in pages] == [7, 7, 6]
    assert [job for page in pages for job in page] == expected


def test_scheduled_jobs_are_paged_by_the_time_at_which_they_are_due(database, connect):
    admin = connect(autocommit=True)
    due = {}
    for n in range(20):
        # Later jobs are due earlier, and some at the same time.
        at = datetime(2999, 1, 28 - n // 3, tzinfo=UTC)
        origin = f"local/{n % 2}"
        due[add_job(admin, state="scheduled", run_at=at, origin=origin)] = at
    pages = read_pages(database, "scheduled")
    assert [len(page) for page in pages] == [7, 7, 6]
    listed = [job for page in pages for job in page]
    assert listed == sorted(due, key=lambda job: (due[job], job))
    with pytest.raises(OperatingError, match="job 4711 is not in the list of sch"):
        list_jobs(database, "scheduled", after=4711)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": "asleep"}, "no job is ever 'asleep': one of available"),
        ({"limit": 1_001}, "1 to 1,000, not 1001"),
        (
            {"filter": Filter(error="x")},
            "only discarded jobs are listed by their error",
        ),
        ({"filter": Filter(since=datetime.now(UTC))}, "listed by time"),
    ],
)
def test_invalid_list_arguments_are_refused(database, arguments, message):
    with pytest.raises(OperatingError, match=message):
        list_jobs(database, **arguments)


def test_a_job_is_shown_with_all_that_is_known(database, connect, command):
    admin = connect(autocommit=True)
    job = add_job(
        admin,
        group="g\x1b[31m",
        payload='{"tail": "N1", "note": "\\u001b[2J[bold]"}',
        headers='{"traceparent": "00-ab"}',
        unique_key="k",
        priority=1,
        attempt=1,
        errors='[{"attempt": 1, "at": "2026-01-01", "error": "HTTP\\u001b[2J 503"}]',
    )
    add_claim(admin, add_owner(admin), job)
    shown = json.loads(command("jobs", "show", str(job), "--json").output)
    assert shown["payload"]["tail"] == "N1"
    assert shown["headers"] == {"traceparent": "00-ab"}
    assert (shown["unique_key"], shown["priority"], shown["pod"]) == ("k", 1, "pod-x")
    assert shown["state"] == "running"
    for text in (
        command("jobs", "show", str(job)).output,
        command("jobs", "list").output,
        command("jobs", "explain", str(job)).output,
    ):
        # The text of a payload or an error must not control the operator's terminal.
        assert "\x1b" not in text
    assert "[bold]" in command("jobs", "show", str(job)).output
    missing = command("jobs", "show", "4711")
    assert "jobs explain 4711" in str(missing.exception)


def test_commands_say_what_they_did(command, connect):
    admin = connect(autocommit=True)
    first, second = add_job(admin), add_job(admin)
    listed = command("jobs", "list", "--limit", "1")
    assert f"there may be more: go on with --after {first}" in listed.output
    rows = json.loads(command("jobs", "list", "--json").output)
    assert [row["id"] for row in rows] == [first, second]
    cancelled = command("jobs", "cancel", str(first), "--json")
    assert json.loads(cancelled.output) == [{"id": first, "became": "cancelled"}]
    assert cancelled.exit_code == 0
    assert command("jobs", "cancel", str(first)).exit_code == 1
    assert "days made: 2" in command("jobs", "maintain").output
    nothing = command("jobs", "retry")
    assert "say which" in str(nothing.exception)


@pytest.mark.parametrize("state", [emptied, full, few_groups])
def test_a_look_up_by_id_never_reads_the_table(database, monkeypatch, state):
    with database.connect("test") as connection:
        state(connection)
        (job,) = connection.execute("select max(id) - 5 from jobs_lib.jobs").fetchone()
        plans = Plans(connection)
        monkeypatch.setattr(type(database), "connect", lambda *_: _Kept(connection))
        with plans.told(generic=True) as generic:
            look_up(database, job)
        with plans.told(generic=False) as custom:
            look_up(database, job - 1)
    assert min(len(generic), len(custom)) > 10
    for plan in generic + custom:
        assert not re.search(r"Seq Scan on jobs", plan), plan
        for index in re.findall(r"using (\w+) on jobs", plan):
            assert index in {"jobs_pkey", "jobs_of_group", "jobs_due"}, plan
        # Every look starts at an origin, except the first look of all.
        looks = r"Index (Only )?Scan using \w+ on jobs\b.*\n *(.*)"
        for only, condition in re.findall(looks, plan):
            if condition.startswith(("Index Cond", "Filter")) or not only:
                assert re.match("Index Cond: .*origin", condition), plan


def look_up(database, job: int) -> None:
    """Run every statement that finds jobs by their ids, and the lists."""
    show_job(database, job)
    explain(database, job)
    list_jobs(database)
    list_jobs(database, "scheduled")
    with pytest.raises(OperatingError, match="not in the list"):
        list_jobs(database, "scheduled", after=job)
    list_jobs(database, "running")
    assert cancel(database, [job]) == {job: "cancelled"}


class _Kept:
    """A connection that stays open when the block ends."""

    def __init__(self, connection) -> None:
        self._connection = connection

    def __enter__(self):
        return self._connection

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_page_of_a_million_jobs_is_there_within_a_second(database, connect):
    admin = connect(autocommit=True)
    admin.execute(
        'insert into jobs_lib.jobs (origin, type, "group", payload)'
        " select 'local/' || g % 16, 'work', 'g' || g % 1000, '{}'"
        " from generate_series(1, 1000000) g"
    )
    admin.execute(
        "insert into jobs_lib.history"
        " (keep_until, id, origin, type, outcome, attempt, enqueued_at)"
        " select now(), g + 1000000, 'local/1', 'work', 'completed', 1, now()"
        " from generate_series(1, 1000000) g"
    )
    admin.execute("vacuum analyze jobs_lib.jobs")
    admin.execute("vacuum analyze jobs_lib.history_default")
    for look in (
        lambda: list_jobs(database),
        lambda: list_jobs(database, "available"),
        lambda: list_jobs(database, "waiting", Filter(group="g7")),
        lambda: list_jobs(database, "completed", limit=100),
        lambda: show_job(database, 900_000),
        lambda: explain(database, 900_000),
        lambda: explain(database, 1_900_000),
    ):
        # The best of three counts: the machine may be busy with other work.
        took = []
        for _ in range(3):
            begun = time.monotonic()
            assert look()
            took.append(time.monotonic() - begun)
        print(f"{min(took) * 1000:.0f} ms")
        assert min(took) < 1
