"""The signature of a handler changes while its jobs wait."""

from __future__ import annotations

from typing import Any

import pytest

from jobs_lib import Discard, Job, exponential
from tests.support.apps import HOME, executing, heard, make_app

# Any error of a handler discards its job at once.
STRICT: dict[str, Any] = {
    "group": "customer",
    "retry": exponential(first=0.05, cap=0.05, max_attempts=1),
    "rules": {Exception: Discard},
}


@pytest.mark.guarantee("J5")
def test_a_changed_signature_loses_no_queued_job(database_url, connect, wait_for):
    ran: list[tuple[Any, ...]] = []
    before, broken, fixed = (make_app(database_url) for _ in range(3))

    @before.job(name="ship", **STRICT)
    def ship(job: Job, customer: str, order: int) -> None: ...

    @before.job(name="bill", **STRICT)
    def bill(job: Job, customer: str, order: int) -> None: ...

    @before.job(name="remind", **STRICT)
    async def remind(job: Job, customer: str, order: int) -> None: ...

    for app in (broken, fixed):

        @app.job(name="ship", **STRICT)
        def ship_by(job: Job, customer: str, order: int, by: str = "rail") -> None:
            ran.append(("ship", order, by, job.attempt))

    @broken.job(name="bill", **STRICT)
    def bill_in(job: Job, customer: str, order: int, currency: str) -> None:
        ran.append(("broken", order))

    @broken.job(name="remind", **STRICT)
    async def remind_in(job: Job, customer: str, order: int, days: int) -> None:
        ran.append(("broken", order))

    @fixed.job(name="bill", **STRICT)
    def bill_now(job: Job, customer: str, order: int, currency: str = "EUR") -> None:
        ran.append(("bill", order, currency, job.attempt))

    @fixed.job(name="remind", **STRICT)
    async def remind_now(job: Job, customer: str, order: int, days: int = 3) -> None:
        ran.append(("remind", order, days, job.attempt))

    with connect() as connection:
        for order, job_type in enumerate([ship, bill, ship, remind]):
            # All are for one customer: jobs behind a kept job wait with it.
            job_type.enqueue(connection, customer="ada", order=order)
        remind.enqueue(connection, customer="bob", order=4)
    with executing(broken, HOME), heard("jobs.retried") as kept:
        wait_for(lambda: len(kept) >= 6, what="each has been tried several times")
    assert ran == [("ship", 0, "rail", 1)]
    with connect() as connection:
        left = connection.execute(
            "select attempt, errors->-1->>'error' from jobs_lib.jobs order by id"
        ).fetchall()
    assert [attempt for attempt, _ in left] == [0, 0, 0, 0]
    for at, missing in ((0, "currency"), (3, "days")):
        assert "the stored payload does not fit the handler" in left[at][1]
        assert f"{missing}: field required" in left[at][1]
    with executing(fixed, HOME):
        wait_for(lambda: len(ran) == 5, what="all have run")
    assert [one for one in ran if one[1] != 4] == [
        ("ship", 0, "rail", 1),
        ("bill", 1, "EUR", 1),
        ("ship", 2, "rail", 1),
        ("remind", 3, 3, 1),
    ]
    assert ("remind", 4, 3, 1) in ran
