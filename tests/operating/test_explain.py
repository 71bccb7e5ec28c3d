"""The reasons for which a job does not run, each with its values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.operating import cancel, explain, pause
from tests.operating.helpers import add_claim, add_discarded, add_job, add_owner
from tests.support.apps import executing, make_app
from tests.support.places import Partition

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import Job


def not_due(admin: Any) -> int:
    add_owner(admin)
    return add_job(admin, state="scheduled", run_at="2999-01-01", attempt=0)


def in_backoff(admin: Any) -> int:
    add_owner(admin)
    return add_job(
        admin,
        state="scheduled",
        run_at="2999-01-01",
        attempt=4,
        errors='[{"attempt": 4, "error": "HTTP 503"}]',
    )


def put_off(admin: Any) -> int:
    add_owner(admin)
    errors = '[{"attempt": 0, "error": "Snooze: they open at nine"}]'
    return add_job(admin, state="scheduled", run_at="2999-01-01", errors=errors)


def rate_limited(admin: Any) -> int:
    add_owner(admin)
    errors = '[{"attempt": 0, "error": "RateLimited: 600 records a minute"}]'
    return add_job(admin, state="scheduled", run_at="2999-01-01", errors=errors)


def behind_the_head(admin: Any) -> int:
    add_owner(admin)
    add_job(admin, group="g", state="scheduled", run_at="2999-01-01", attempt=2)
    add_job(admin, group="g")
    return add_job(admin, group="g")


def claimed(admin: Any) -> int:
    job = add_job(admin)
    add_claim(admin, add_owner(admin), job)
    return job


def without_an_owner(admin: Any) -> int:
    return add_job(admin)


def owner_silent(admin: Any) -> int:
    job = add_job(admin)
    add_claim(admin, add_owner(admin, silent=90), job)
    return job


def owner_gone(admin: Any) -> int:
    job = add_job(admin)
    add_owner(admin)
    admin.execute("delete from jobs_lib.processes")
    return job


def type_paused(admin: Any) -> int:
    add_owner(admin)
    admin.execute("insert into jobs_lib.pauses values ('type', 'work')")
    return add_job(admin)


def origin_and_group_paused(admin: Any) -> int:
    add_owner(admin)
    admin.execute(
        "insert into jobs_lib.pauses values ('origin', 'local/3'), ('group', 'g'),"
        " ('type', 'another')"
    )
    return add_job(admin, group="g")


def spaced_group_paused(admin: Any) -> int:
    add_owner(admin)
    admin.execute("insert into jobs_lib.pauses values ('group', 'ada & sons')")
    return add_job(admin, group="ada & sons")


def known_to_nobody(admin: Any) -> int:
    add_owner(admin, types=["mail"])
    return add_job(admin)


def known_elsewhere(admin: Any) -> int:
    add_owner(admin, types=["mail"])
    add_owner(admin, origin="local/4", types=["work"])
    return add_job(admin)


def ready(admin: Any) -> int:
    add_owner(admin, types=["work"])
    add_job(admin)
    return add_job(admin)


def discarded(admin: Any) -> int:
    return add_discarded(admin, error="HTTP 404")


def finished(admin: Any) -> int:
    job = add_job(admin)
    admin.execute("delete from jobs_lib.jobs")
    admin.execute(
        "insert into jobs_lib.history"
        " (keep_until, id, origin, type, outcome, attempt, enqueued_at)"
        " values (now(), %s, 'local/3', 'work', 'completed', 2, now())",
        (job,),
    )
    return job


def rolled_back(admin: Any) -> int:
    with admin.transaction(force_rollback=True):
        return add_job(admin)


def never_enqueued(admin: Any) -> int:
    return add_job(admin) + 1


@pytest.mark.guarantee("J24")
@pytest.mark.parametrize(
    ("arrange", "codes", "text"),
    [
        (not_due, ["scheduled"], r"not due until 2999-01-01 .*, in [\d,]+ s$"),
        (in_backoff, ["scheduled"], r"failed 4 times, the last error was: HTTP 503"),
        (put_off, ["scheduled"], r"put off by: Snooze: they open at nine$"),
        (
            rate_limited,
            ["rate_limited"],
            r"rate limited until 2999-01-01 .*, in [\d,]+ s: 600 records a minute$",
        ),
        (behind_the_head, ["behind"], r"behind job 1, the head of .*'g'; .* it: 2$"),
        (claimed, ["running"], r"claimed at 20.* by pod pod-x .*at epoch 7: it runs"),
        (without_an_owner, ["no_owner"], r"no process owns its origin local/3"),
        (owner_silent, ["stale_owner"], r"pod pod-x .* silent for 9\d s"),
        (owner_gone, ["stale_owner"], r"at epoch 7, is gone"),
        (type_paused, ["paused"], r"type 'work' is paused since .*resume type work"),
        (origin_and_group_paused, ["paused", "paused"], r"group 'g' is paused"),
        (spaced_group_paused, ["paused"], r"`jobs-lib jobs resume group 'ada & sons'`"),
        (known_to_nobody, ["unknown_type"], r"none of the 1 live .* the type 'work'"),
        (known_elsewhere, ["unknown_type"], r"does not know .*known on: pod-x"),
        (ready, ["ready"], r"nothing keeps it: pod pod-x .*; 1 jobs lie before it"),
        (discarded, ["discarded"], r"after 3 attempts, .*HTTP 404.*jobs retry 1"),
        (finished, ["finished"], r"completed at 20.*attempts in all: 2"),
        (rolled_back, ["gone"], r"no table has it.*rolled back"),
        (never_enqueued, ["never_existed"], r"never existed: the latest job is 1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_reason_is_named_with_its_values(
    database, connect, arrange: Callable[[Any], int], codes, text
):
    admin = connect(autocommit=True)
    job = arrange(admin)
    found = explain(database, job)
    assert found.codes == codes
    assert any(re.search(text, reason.text) for reason in found.reasons), found


def test_explain_names_the_reason_for_which_the_head_of_the_group_waits(
    database, connect
):
    admin = connect(autocommit=True)
    job = behind_the_head(admin)
    head = explain(database, job).head
    assert head is not None
    assert (head.job, head.codes) == (1, ["scheduled"])
    pause(database, "group", "g")
    found = explain(database, job)
    assert found.codes == ["paused", "behind"]
    assert found.head is not None
    assert found.head.codes == ["paused", "scheduled"]


def test_a_running_service_says_which_types_it_knows(
    database, database_url, connect, wait_for
):
    app = make_app(database_url)

    @app.job()
    def mail(job: Job) -> None: ...

    admin = connect(autocommit=True)
    job = add_job(admin)
    with executing(app, ["local/3"]):
        wait_for(
            lambda: explain(database, job).codes == ["unknown_type"],
            what=lambda: f"it is explained: {explain(database, job)}",
        )
    cancel(database, [job])
    assert explain(database, job).codes == ["finished"]


def test_the_explain_command_prints_a_line_for_each_job(command, connect):
    job = str(behind_the_head(connect(autocommit=True)))
    lines = command("jobs", "explain", job).output.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"job {job}", "job 1"]
    told = json.loads(command("jobs", "explain", job, "--json").output)
    assert told["reasons"][0]["code"] == "behind"


@pytest.mark.guarantee("K22", "J24")
@pytest.mark.parametrize("add", [add_job, add_discarded])
def test_the_explanation_of_a_job_shows_the_records_that_it_comes_from(
    database, command, admin, add
):
    partition, other = (Partition(database, admin, number) for number in range(2))
    job = add(admin)
    if add is add_job:
        admin.execute(
            "update jobs_lib.jobs set source = %s, record_offset = 9",
            (partition.source,),
        )
    kept = (
        "insert into jobs_lib.kept_places (source, record_offset, job_id, origin)"
        " values (%s, %s, %s, 'local/3')"
    )
    for one, offset in ((partition, 7), (other, 8)):
        admin.execute(kept, (one.source, offset, job))
    told = [
        f"comes from the record at flights/{number} offset {offset}: until it is done, "
        "board is not done with that record"
        for number, offset in ((0, 7), (1, 8))
    ]
    assert explain(database, job).places == told
    lines = command("jobs", "explain", str(job)).output.splitlines()
    assert lines[-2:] == [f"job {job}: {one}" for one in told]
    # One that has ended holds nothing back.
    admin.execute("delete from jobs_lib.jobs")
    admin.execute("delete from jobs_lib.discarded")
    assert explain(database, job).places == []
