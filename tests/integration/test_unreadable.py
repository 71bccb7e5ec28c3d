"""JSON that SQL has written and Python cannot read stops nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.schemas.json_limits import Unreadable, read_json
from tests.support.apps import HOME, count, executing

if TYPE_CHECKING:
    from jobs_lib import Job

UNREADABLE = {
    "levels": '{"a": ' + "[" * 2_000 + "]" * 2_000 + "}",
    "digits": '{"a": ' + "1" * 5_000 + "}",
    "no object": '["a"]',
}


@pytest.mark.parametrize("headers", UNREADABLE.values(), ids=[*UNREADABLE])
def test_unreadable_headers_of_a_job_stop_no_job(
    app, admin, connect, wait_for, headers
):
    ran: list[tuple[int, object]] = []

    @app.job()
    def work(job: Job, n: int) -> None:
        ran.append((n, job.headers))

    with connect() as connection:
        for n in range(3):
            given = {"trace": str(n)}
            work.options(headers=given, origin=HOME[0]).enqueue(connection, n=n)
    admin.execute(
        "update jobs_lib.jobs set headers = %s::jsonb where payload ->> 'n' = '1'",
        (headers,),
    )
    with executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="nothing is left")
    assert sorted(ran) == [(0, {"trace": "0"}), (1, None), (2, {"trace": "2"})]


def test_readable_json_is_read_and_unreadable_json_is_marked():
    assert read_json(b'{"a": [1, null]}') == {"a": [1, None]}
    assert isinstance(read_json("[" * 100_000), Unreadable)
