"""Very many requests to cancel are left over: looks cost what they did before."""

from __future__ import annotations

import pytest

from tests.plans.test_old_snapshots import count_pages

LEFT = 10_000
LEAVE = (
    "insert into jobs_lib.cancellations (id, origin)"
    " select -n, 'local/3' from generate_series(1, %s) n"
)
ASK = "insert into jobs_lib.cancellations values (%s, 'local/3')"
ADD = (
    "insert into jobs_lib.jobs (origin, type, payload)"
    " select 'local/3', 'work', '{}' from generate_series(1, %s) n returning id"
)


@pytest.mark.guarantee("FP25")
def test_a_poll_does_not_grow_with_leftover_requests_to_cancel(owner, admin):
    admin.execute(LEAVE, (LEFT,))
    admin.execute("analyze jobs_lib.cancellations")
    (wanted,) = admin.execute(ADD, (1,)).fetchone()
    owner.look()
    assert owner.look() < 200
    owner.claim()
    admin.execute(
        "insert into jobs_lib.cancellations values (%s, 'local/3')", (wanted,)
    )
    owner.look()
    assert owner.poller.cancelled == {wanted}
    flying = {"ids": [*owner.claimer.in_flight.jobs]}
    query = owner.queries["find_cancelled"]
    with owner.connection.transaction(force_rollback=True):
        assert count_pages(owner.connection, query, flying) < 10


def test_the_first_poll_finds_a_request_to_cancel(owner, admin):
    (wanted,) = admin.execute(ADD, (1,)).fetchone()
    owner.look()
    owner.claim()
    admin.execute(
        "insert into jobs_lib.cancellations values (%s, 'local/3')", (wanted,)
    )
    owner.look()
    assert owner.poller.cancelled == {wanted}
    admin.execute("delete from jobs_lib.cancellations")
    owner.look()
    assert owner.poller.cancelled == set()
