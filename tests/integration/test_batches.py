"""Batch handlers: one call for several jobs."""

from __future__ import annotations

import pytest

from jobs_lib import Item, OutOfTurnError, exponential
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

    def run(first: int) -> int:
        """Let a hundred jobs run; return how many there were until now."""
        numbers = range(first, first + 100)
        given = [{"payload": {"n": str(n), "group": f"g{n % 4}"}} for n in numbers]
        with connect() as connection:
            index.enqueue_many(connection, given)
        wait_for(lambda: ended(admin) == numbers.stop, what="all ended")
        return numbers.stop

    with executing(app, HOME, workers=1):
        count = run(0)
        # An executor claims as many as it runs in some time: on a busy machine the
        # calls are small at first.
        while max(calls) <= 5:
            count = run(count)
    assert max(calls) <= 20
    for group, found in ran.items():
        # Jobs behind the failed one ran again: only the first run of each counts here.
        in_order = list(dict.fromkeys(found))
        later = [n for n in range(count) if f"g{n % 4}" == group]
        if way == "raises":
            assert found == later
        assert sorted(in_order) == later
    attempts = admin.execute(
        "select attempt, count(*) from jobs_lib.history group by attempt order by 1"
    )
    assert attempts.fetchall() == [(1, count - 1), (4, 1)]


@pytest.fixture
def effects(admin):
    """A table that numbers its rows; returns what it holds, in their order."""
    admin.execute("create table effects (id int generated always as identity, n int)")
    return lambda: [
        n for (n,) in admin.execute("select n from effects order by id").fetchall()
    ]


def attempts_of(admin) -> list[int]:
    rows = admin.execute("select attempt from jobs_lib.history order by id")
    return [attempt for (attempt,) in rows.fetchall()]


@pytest.mark.guarantee("J29", "J6")
@pytest.mark.parametrize("group", [None, "g"], ids=["alone", "group"])
def test_an_item_that_has_committed_does_not_run_again_when_its_call_fails(
    app, admin, connect, wait_for, effects, group
):
    calls: list[tuple[int, int]] = []

    @app.batch(group=lambda payload: group)
    def index(items: list[Item[int]]) -> None:
        for item in items:
            calls.append((len(items), item.payload))
            if len(items) > 1 and item.payload == 2:
                raise RuntimeError("two")
            with item.job.transaction() as connection:
                connection.execute(
                    "insert into effects (n) values (%s)", (item.payload,)
                )

    with connect() as connection:
        index.options(origin="local/0").enqueue_many(
            connection, [{"payload": n} for n in (1, 2)]
        )
    # For one worker the first claim takes two jobs.
    with executing(app, ["local/0"], workers=1):
        wait_for(lambda: ended(admin) == 2, what="all ended")
    assert calls == [(2, 1), (2, 2), (1, 2)]
    assert effects() == [1, 2]
    assert attempts_of(admin) == [1, 1]


@pytest.mark.guarantee("J29", "S9", "S17")
@pytest.mark.parametrize("caught", [Exception, ValueError], ids=["all", "own"])
def test_no_item_commits_behind_a_failed_one_of_its_group(
    app, admin, connect, wait_for, effects, caught
):
    calls: list[int] = []

    @app.batch(group=lambda payload: "g", retry=QUICK)
    def index(items: list[Item[int]]) -> None:
        calls.append(len(items))
        for item in items:
            try:
                with item.job.transaction() as connection:
                    connection.execute(
                        "insert into effects (n) values (%s)", (item.payload,)
                    )
                    if item.payload == 1 and item.job.attempt == 1:
                        raise ValueError("one")
            except caught as error:
                item.fail(error)

    with connect() as connection:
        index.enqueue_many(connection, [{"payload": n} for n in (1, 2)])
    with executing(app, HOME, workers=1):
        wait_for(lambda: ended(admin) == 2, what="all ended")
    assert calls[0] == 2
    assert effects() == [1, 2]
    assert attempts_of(admin) == [2, 1]


@pytest.mark.guarantee("J29", "S9")
@pytest.mark.parametrize("fails", [False, True], ids=["raises", "marks"])
def test_the_transactions_of_a_group_open_in_its_order(
    app, admin, connect, wait_for, effects, fails
):
    refused: list[str] = []

    @app.batch(group=lambda payload: "g")
    def index(items: list[Item[int]]) -> None:
        for item in reversed(items):
            try:
                with item.job.transaction() as connection:
                    connection.execute(
                        "insert into effects (n) values (%s)", (item.payload,)
                    )
            except OutOfTurnError as error:
                refused.append(str(error))
                if not fails:
                    raise
                item.fail(error)

    with connect() as connection:
        index.enqueue_many(connection, [{"payload": n} for n in (1, 2)])
    with executing(app, HOME, workers=1):
        wait_for(lambda: ended(admin) == 2, what="all ended")
    (refusal,) = refused
    assert "before job 1 ahead of it in its group has committed" in refusal
    assert effects() == [1, 2]
    assert attempts_of(admin) == [1, 1]


def test_a_batch_handler_with_another_signature_is_refused(app):
    with pytest.raises(ConfigurationError, match=r"list\[Item\[T\]\]"):

        @app.batch()
        def one(items: list[str]) -> None: ...

    with pytest.raises(ConfigurationError, match="2 to 10,000"):
        app.batch(size=1)
