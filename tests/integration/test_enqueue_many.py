"""One call enqueues many jobs: their order, their characters, and all or none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from jobs_lib import EnqueueError, Job, PayloadError
from tests.support.apps import make_app


@pytest.mark.parametrize("groups", [3, 200])
def test_a_bulk_enqueue_waits_for_its_groups_too(connect, notify, groups):
    first = connect()
    notify.enqueue(first, order=1, customer="c1")
    payloads = [{"order": n, "customer": f"c{n}"} for n in range(groups)]
    with connect() as second:
        second.execute("set lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            notify.enqueue_many(second, payloads)
    first.rollback()


def test_a_bulk_enqueue_keeps_order_and_every_character(connect, database_url):
    app = make_app(database_url)

    @app.job(group="key")
    def store(job: Job, key: str, text: str) -> None: ...

    awkward = [
        "tab\there",
        "line\nbreak",
        "back\\slash",
        "\\N",
        'quo"te',
        "ü€𝄞",
        "\r\x01",
    ]
    payloads = [{"key": f"k\\{text}", "text": text} for text in awkward]
    with connect() as connection:
        assert store.enqueue_many(connection, payloads) == len(awkward)
    with connect() as connection:
        rows = connection.execute(
            'select payload, "group" from jobs_lib.jobs order by id'
        ).fetchall()
    assert rows == [(payload, payload["key"]) for payload in payloads]


def test_a_bulk_enqueue_can_be_for_later(connect, notify):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with connect() as connection:
        notify.options(run_at=tomorrow).enqueue_many(connection, [{"order": 1}])
        row = connection.execute("select state, run_at from jobs_lib.jobs").fetchone()
    assert row == ("scheduled", tomorrow)


def test_a_bulk_enqueue_for_a_time_that_has_passed_waits_for_no_promotion(
    connect, notify
):
    yesterday = datetime.now(UTC) - timedelta(days=1)
    with connect() as connection:
        notify.options(run_at=yesterday).enqueue_many(connection, [{"order": 1}])
        row = connection.execute("select state, run_at from jobs_lib.jobs").fetchone()
    assert row == ("available", yesterday)


@pytest.mark.guarantee("J3")
def test_a_hundred_thousand_jobs_in_one_call_keep_the_order_of_their_groups(
    connect, notify
):
    count = 100_000
    payloads = [
        {"order": n, "customer": f"c{n % 700}"} if n % 3 else {"order": n}
        for n in range(count)
    ]
    with connect() as connection:
        assert notify.enqueue_many(connection, payloads) == count
        swapped = connection.execute(
            "select count(*) from ("
            " select (payload ->> 'order')::int as n, lag((payload ->> 'order')::int)"
            '  over (partition by "group" order by id) as before'
            ' from jobs_lib.jobs where "group" is not null) pairs where before > n'
        ).fetchone()
        assert swapped == (0,)
        origins = connection.execute(
            'select "group", count(distinct origin) from jobs_lib.jobs group by "group"'
        ).fetchall()
        # The jobs of a group lie together, and the others in all origins.
        assert sorted(origins, key=str) == sorted(
            [(None, 16), *((f"c{n}", 1) for n in range(700))], key=str
        )
        connection.rollback()
        assert connection.execute("select from jobs_lib.jobs limit 1").rowcount == 0


def test_a_wrong_payload_among_many_is_named_and_none_is_sent(connect, notify):
    with connect() as connection:
        payloads = [{"order": n} for n in range(100)]
        payloads[37] = {"order": "x"}  # type: ignore[dict-item]
        with pytest.raises(PayloadError, match=r"37\.order: input should be"):
            notify.enqueue_many(connection, payloads)
        # The call did not even open a transaction.
        status = connection.info.transaction_status
        assert status == psycopg.pq.TransactionStatus.IDLE
        assert notify.enqueue_many(connection, []) == 0


def test_a_unique_key_for_many_is_refused(connect, notify):
    with connect() as connection, pytest.raises(EnqueueError, match="enqueue for each"):
        notify.options(unique="k").enqueue_many(connection, [{"order": 1}])
