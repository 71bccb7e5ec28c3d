"""Batch handlers: one call for several jobs."""

from __future__ import annotations

import pytest

from jobs_lib import Item, exponential
from jobs_lib.errors import ConfigurationError
from tests.support.apps import HOME, executing


def ended(admin) -> int:
    return admin.execute("select count(*) from jobs_lib.history").fetchone()[0]


QUICK = exponential(first=0.01, cap=0.01)


@pytest.mark.guarantee("J29")
@pytest.mark.parametrize("way", ["raises", "marks"])
def test_a_batch_call_keeps_groups_in_order_and_fails_only_the_failed_item(
    app, admin, connect, wait_for, way
):
    calls: list[int] = []
    ran: dict[str, list[int]] = {}
    failed = 0

    @app.batch(size=20, group=lambda payload: payload["group"], retry=QUICK)
    def index(items: list[Item[dict[str, str]]]) -> None:
        nonlocal failed
        calls.append(len(items))
        for item in items:
            if item.payload["n"] == "7" and failed < 3:
                if len(items) == 1 or way == "marks":
                    failed += 1
                error = RuntimeError("seven")
                if way == "raises":
                    raise error
                item.fail(error)
        for item in items:
            if item.failure is None:
                ran.setdefault(item.payload["group"], []).append(int(item.payload["n"]))

    with connect() as connection:
        index.enqueue_many(
            connection,
            [{"payload": {"n": str(n), "group": f"g{n % 4}"}} for n in range(100)],
        )
    with executing(app, HOME, workers=1):
        wait_for(lambda: ended(admin) == 100, what="all ended")
    assert max(calls) > 5
    assert max(calls) <= 20
    for group, found in ran.items():
        # Jobs behind the failed one ran again: only the first run of each counts here.
        in_order = list(dict.fromkeys(found))
        later = [n for n in range(100) if f"g{n % 4}" == group]
        if way == "raises":
            assert found == later
        assert sorted(in_order) == later
    attempts = admin.execute(
        "select attempt, count(*) from jobs_lib.history group by attempt order by 1"
    )
    assert attempts.fetchall() == [(1, 99), (4, 1)]


def test_a_batch_handler_with_another_signature_is_refused(app):
    with pytest.raises(ConfigurationError, match=r"list\[Item\[T\]\]"):

        @app.batch()
        def one(items: list[str]) -> None: ...

    with pytest.raises(ConfigurationError, match="2 to 10,000"):
        app.batch(size=1)
