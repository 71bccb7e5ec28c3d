"""Two applications on the same tables, which share the origins by heartbeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.errors import ConfigurationError
from tests.support.apps import count, heard, make_app, running

if TYPE_CHECKING:
    from jobs_lib import App, Job

pytestmark = pytest.mark.expects("fenced")


def make_pod(url: str, *types: str, schema: str = "jobs_lib") -> tuple[App, list[str]]:
    app = make_app(url, schema_name=schema)
    ran: list[str] = []

    def declare(name: str) -> None:
        @app.job(name=name)
        def work(job: Job) -> None:
            ran.append(name)

    for name in types:
        declare(name)
    return app, ran


def enqueue(app: App, connect, each: int = 20) -> None:
    with connect() as connection:
        for job_type in app.jobs.values():
            for _ in range(each):
                job_type.enqueue(connection)


@pytest.mark.guarantee("J40")
def test_an_application_with_other_types_is_refused_with_the_way_out(
    database_url, admin, connect, wait_for
):
    one, ran = make_pod(database_url, "a")
    two, ran_two = make_pod(database_url, "b")
    enqueue(one, connect)
    enqueue(two, connect)
    with running(one, "executor"):
        with (
            pytest.raises(ConfigurationError, match=r"\(a; here b\).*JOBS_LIB_SCHEMA"),
            running(two, "executor"),
        ):
            pass
        wait_for(lambda: len(ran) == 20, what="its own jobs run")
    assert not count(admin, "processes")
    # Its jobs were not touched, and run as soon as the other one is gone.
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
def test_a_release_with_more_or_fewer_types_is_no_stranger(database_url, types):
    one, _ = make_pod(database_url, "a", "b")
    two, _ = make_pod(database_url, *types)
    with (
        running(one, "executor"),
        heard("types.differ") as told,
        running(two, "executor"),
    ):
        pass
    assert not told
