"""The same rows are chosen in every time zone of the session."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from psycopg import sql

from tests.support.apps import HOME, count, executing, make_app, running
from tests.support.records import read_topic
from tests.support.waiting import wait_for

HOUR = 3_600
AGES = range(-120, 121, 15)
"""Minutes from now; the clocks changed half an hour ago."""


def make_zone(*, summer: bool) -> str:
    """A zone whose clocks went forward, or back, half an hour ago, by POSIX's rules."""
    change = datetime.now(UTC) - timedelta(minutes=30)
    # Winter time is UTC. The end of summer is given in summer time.
    forward = change if summer else change - timedelta(days=120)
    back = (change if not summer else change + timedelta(days=120)) + timedelta(hours=1)
    rules = [f"{at.timetuple().tm_yday - 1}/{at:%H:%M:%S}" for at in (forward, back)]
    return f"WIN0SUM-1,{','.join(rules)}"


@pytest.fixture(params=["UTC", "forward", "back", "Pacific/Kiritimati"])
def zone(request, admin, connect):
    """A time zone for all sessions that begin from now on."""
    name = request.param
    if name in ("forward", "back"):
        name = make_zone(summer=name == "forward")
    database = sql.Identifier(admin.info.dbname)
    admin.execute(sql.SQL("alter database {} set timezone = {}").format(database, name))
    hours = "extract(hour from now() - interval '{}' minute)".format
    ask = f"select {hours(40)}::int, {hours(20)}::int, now()::text"
    with connect() as connection:
        before, after, _ = connection.execute(ask).fetchone()
        utc = connection.execute(
            ask.replace("now()", "now() at time zone 'UTC'")
        ).fetchone()
    moved = ((after - before) - (utc[1] - utc[0])) % 24
    assert moved == {"forward": 1, "back": 23}.get(request.param, 0)
    return name


@pytest.mark.guarantee("W13")
def test_the_same_rows_are_chosen_in_every_time_zone(
    zone, database_url, admin, topic, bootstrap_servers, connect
):
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    calm = app.topic(topic(1), value=int, compacted=True, settle=HOUR)
    prompt = app.topic(topic(1), value=int)
    ran: list[int] = []

    @app.job()
    def work(job, minutes: int) -> None:
        ran.append(minutes)

    with connect() as connection:
        for minutes in AGES:
            calm.send(connection, key=f"{minutes}", value=minutes)
            at = datetime.now(UTC) + timedelta(minutes=minutes + 5)
            work.options(run_at=at).enqueue(connection, minutes=minutes)
        # Sessions in other zones wrote these times: each is the same moment everywhere.
        connection.execute(
            "update jobs_lib.outbox set created_at ="
            " clock_timestamp() + make_interval(mins => key::int + 5)"
        )
    # A time ahead comes from before the clock was set back, and counts as settled.
    settled = [minutes for minutes in AGES if not -60 < minutes + 5 <= 0]
    due = [minutes for minutes in AGES if minutes + 5 <= 0]
    with running(app, "relay"), executing(app, HOME):
        wait_for(
            lambda: count(admin, "outbox") <= len(AGES) - len(settled),
            timeout=60,
            what="what has settled is sent",
        )
        wait_for(lambda: len(ran) >= len(due), timeout=60, what="what is due has run")
        # These come behind all that were chosen so far, in every shard.
        with connect() as connection:
            work.enqueue(connection, minutes=0)
            for n in range(64):
                prompt.send(connection, key=f"{n}", value=n)
        wait_for(lambda: len(ran) > len(due), timeout=60, what="one more has run")
        wait_for(
            lambda: count(admin, "outbox") <= len(AGES) - len(settled),
            timeout=60,
            what="what need not settle is sent",
        )
    records = read_topic(bootstrap_servers, calm.name)
    assert sorted(record.json for record in records) == settled
    assert sorted(ran) == sorted([*due, 0])


@pytest.mark.guarantee("W13")
def test_no_column_stores_a_time_without_its_zone(admin):
    rows = admin.execute(
        "select table_name, column_name from information_schema.columns"
        " where table_schema = 'jobs_lib' and data_type like '%without time zone'"
    )
    assert rows.fetchall() == []
