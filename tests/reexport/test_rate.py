"""The bucket never grants more than the rate in any minute, and nearly all of it."""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from itertools import accumulate

import pytest

from jobs_lib import reexport
from tests.reexport.helpers import make_entity, make_table, query

# A minute, and the longest time from a grant until the record is appended.
WINDOW = 60.6


@pytest.fixture
def limited(database):
    make_table(database, ["N1"])
    reexport.start(database, make_entity(), rate=600)

    def prepare(rate):
        query(
            database,
            "update jobs_lib.reexports set rate = %s, tokens = 0,"
            " refilled_at = clock_timestamp() returning 1",
            rate,
        )

    return prepare


def take_over_time(connection, steps):
    """Take grants ``(at, records)``, and move the bucket's clock by each step."""
    grants, at = [], 0.0
    for seconds, wanted in steps:
        (before,) = connection.execute(
            "update jobs_lib.reexports set refilled_at ="
            " clock_timestamp() - make_interval(secs => %s) returning refilled_at",
            [seconds],
        ).fetchone()
        (granted,) = connection.execute(
            "select jobs_lib.take_records(1, %s::int)", [wanted]
        ).fetchone()
        (after,) = connection.execute(
            "select refilled_at from jobs_lib.reexports"
        ).fetchone()
        # This is a little more than the step, since the machine's own time counts as
        # well.
        at += (after - before).total_seconds()
        grants.append((at, granted))
    return grants


def fullest_window(grants, width):
    times = [at for at, _ in grants]
    sums = [0, *accumulate(count for _, count in grants)]
    return max(
        sums[bisect_right(times, at + width)] - sums[index]
        for index, at in enumerate(times)
    )


@pytest.mark.guarantee("W28", "X7")
@pytest.mark.parametrize("rate", [1, 2, 3, 7, 10, 50, 66, 67, 100, 134, 1_000, 600_000])
def test_no_minute_exceeds_the_rate(database, limited, rate):
    limited(rate)
    rng = random.Random(rate)
    pace = max(0.25, 20 / rate)
    steps = []
    for _ in range(600):
        # The bucket is asked often, but sometimes not for minutes, as in an outage.
        pause = 200 if rng.random() < 0.003 else rng.expovariate(1 / pace)
        steps.append((pause, rng.choice([1, 2, 100, 10**6])))
    with database.connect("test") as connection:
        grants = take_over_time(connection, steps)
    assert min(count for _, count in grants) >= 0
    assert fullest_window(grants, WINDOW) <= rate
    assert fullest_window(grants, 1.0) <= max(rate / 30, 100)


@pytest.mark.parametrize("rate", [10, 60, 134, 6_000, 600_000])
def test_nearly_all_of_the_rate_is_granted(database, limited, rate):
    limited(rate)
    steps = [(0.5, 10**6)] * max(600, 2 * 60 * 60 // rate)
    with database.connect("test") as connection:
        grants = take_over_time(connection, steps)
    minutes = grants[-1][0] / 60
    # One record may be under way at the end.
    assert sum(count for _, count in grants) + 1 >= 0.97 * rate * minutes


@pytest.mark.guarantee("W28", "X7")
def test_many_takers_share_one_bucket(database, limited):
    limited(600_000)
    query(
        database,
        "update jobs_lib.reexports set refilled_at = clock_timestamp()"
        " - interval '1 hour' returning 1",
    )
    started = query(database, "select clock_timestamp()")[0][0]
    granted = []

    def take():
        with database.connect("test") as connection:
            for _ in range(100):
                row = connection.execute(
                    "select jobs_lib.take_records(1, 97)"
                ).fetchone()
                granted.append(row[0])

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = query(database, "select clock_timestamp()")[0][0]
    seconds = (ended - started).total_seconds()
    # A bucket that was full after an unused hour, then the refill, and no more.
    assert 8_941 <= sum(granted) <= 8_941 + 9_750 * seconds + 1


@pytest.mark.guarantee("X7")
@pytest.mark.parametrize(
    ("rate", "is_paused"), [(6_000, True), (600, True), (60_000, False)]
)
def test_a_pause_and_another_rate_leave_one_bucket_for_all(
    database, limited, rate, is_paused
):
    limited(6_000)
    query(database, "update jobs_lib.reexports set tokens = 90 returning 1")
    if is_paused:
        reexport.pause(database, "aircraft")
    # Nobody has taken any for hours.
    query(
        database,
        "update jobs_lib.reexports set refilled_at = refilled_at"
        " - interval '5 hours' returning 1",
    )
    reexport.set_rate(database, "aircraft", rate)
    if is_paused:
        reexport.resume(database, "aircraft")
    take = "select jobs_lib.take_records(1, 1000000)"
    ((began,),) = query(database, "select clock_timestamp()")
    with database.connect("one") as one, database.connect("other") as other:
        granted = [
            connection.execute(take).fetchone()[0] for connection in (one, other, one)
        ]
    ((ended,),) = query(database, "select clock_timestamp()")
    seconds = (ended - began).total_seconds()
    assert granted[0] == int(1 + rate * 0.0149)
    # After that only what flows in meanwhile is granted, and less than one before it.
    assert sum(granted[1:]) <= 1 + rate / 60 * seconds


@pytest.mark.parametrize("state", ["paused", "cancelled", "finished"])
def test_a_re_export_that_does_not_run_is_granted_no_records(database, limited, state):
    limited(6_000)
    query(
        database,
        "update jobs_lib.reexports set state = %s, tokens = 50 returning 1",
        state,
    )
    assert query(database, "select jobs_lib.take_records(1, 10)") == [(0,)]
    assert query(database, "select jobs_lib.take_records(99, 10)") == [(0,)]


def test_a_clock_that_was_set_back_takes_nothing_away(database, limited):
    limited(6_000)
    query(
        database,
        "update jobs_lib.reexports set tokens = 5, refilled_at = clock_timestamp()"
        " + interval '1 hour' returning 1",
    )
    assert query(database, "select jobs_lib.take_records(1, 3)") == [(3,)]
    assert query(database, "select jobs_lib.take_records(1, -3)") == [(0,)]
