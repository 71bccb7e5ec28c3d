"""Schedules tick correctly at both changes of the clock; wrong ones are refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel

from jobs_lib import App, Job
from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.schedule import MOST_TICKS

ZURICH = ZoneInfo("Europe/Zurich")
MIDDAY = datetime(2025, 6, 2, 12, tzinfo=UTC)
CRONS = ["*/5 * * * *", "30 * * * *", "30 2 * * *", "*/20 2 * * *", "0,30 0-4 * * *"]
# They change their clocks at 1:00 UTC, at midnight, back to midnight, by half an hour.
ZONES = ["Europe/Zurich", "America/Santiago", "America/Havana", "Australia/Lord_Howe"]
# cronsim steps by whole hours, so it skips two ticks of that one day.
LEFT_OUT = ("*/20 2 * * *", "Australia/Lord_Howe")


class Height(BaseModel):
    metres: float


def schedule(cron: str, tz: str = "UTC", missed="one", **options):
    app = App("test")

    @app.periodic(cron, tz=tz, missed=missed, **options)
    @app.job()
    def work(job: Job, tick: datetime, region: str = "") -> None: ...

    (made,) = app.schedules.values()
    return made


def ticks_between(made, after: datetime, until: datetime) -> list[datetime]:
    found: list[datetime] = []
    while (tick := made.next(found[-1] if found else after)) <= until:
        found.append(tick)
    return found


def local(made, ticks: list[datetime]) -> list[str]:
    return [made.payload(tick)["tick"].strftime("%H:%M%z") for tick in ticks]


@pytest.mark.parametrize(
    ("cron", "day", "expected"),
    [
        # 2:00 to 3:00 does not exist: a tick with an hour comes right after the gap.
        ("30 2 * * *", (2025, 3, 30), ["03:00+0200"]),
        ("30 1,2,3 * * *", (2025, 3, 30), ["01:30+0100", "03:00+0200", "03:30+0200"]),
        # With a star for the hour, it follows the time that passes.
        ("30 * * * *", (2025, 3, 30), ["00:30+0100", "01:30+0100", "03:30+0200"]),
        # 2:00 to 3:00 comes twice: a tick with an hour comes in the first.
        ("30 2 * * *", (2025, 10, 26), ["02:30+0200"]),
        ("30 1,2,3 * * *", (2025, 10, 26), ["01:30+0200", "02:30+0200", "03:30+0100"]),
        (
            "30 * * * *",
            (2025, 10, 26),
            ["00:30+0200", "01:30+0200", "02:30+0200", "02:30+0100", "03:30+0100"],
        ),
    ],
)
def test_schedules_tick_as_documented_in_a_skipped_or_repeated_hour(
    cron, day, expected
):
    made = schedule(cron, "Europe/Zurich")
    year, month, number = day
    midnight = datetime(year, month, number, tzinfo=ZURICH)
    found = ticks_between(
        made,
        (midnight - timedelta(seconds=1)).astimezone(UTC),
        midnight.replace(hour=3, minute=59).astimezone(UTC),
    )
    assert local(made, found) == expected


@pytest.mark.parametrize(
    ("cron", "tz"),
    [(cron, tz) for cron in CRONS for tz in ZONES if (cron, tz) != LEFT_OUT],
)
def test_the_ticks_do_not_depend_on_the_time_of_the_last_look(cron, tz):
    made = schedule(cron, tz, missed="all")
    changes = find_changes(tz)
    assert len(changes) == 2
    for change in changes:
        begin, end = change - timedelta(hours=4), change + timedelta(hours=5)
        expected = ticks_between(made, begin, end)
        assert all(before < after for before, after in pairwise(expected))
        look = begin
        while look < end:
            ahead = [tick for tick in expected if tick > look]
            assert made.choose(look, end).ticks == ahead
            look += timedelta(minutes=7, seconds=13)


def find_changes(tz: str) -> list[datetime]:
    """The hours of 2025 in which the zone changes its clocks."""
    zone = ZoneInfo(tz)
    begin = datetime(2025, 1, 1, tzinfo=UTC)
    hours = [begin + timedelta(hours=n) for n in range(365 * 24)]
    return [
        after
        for before, after in pairwise(hours)
        if before.astimezone(zone).utcoffset() != after.astimezone(zone).utcoffset()
    ]


def test_a_tick_that_is_noticed_in_time_is_enqueued_whatever_the_rule():
    for missed in ("skip", "one", "all"):
        due = schedule("* * * * *", missed=missed).choose(
            MIDDAY, MIDDAY + timedelta(seconds=61)
        )
        assert due.ticks == [MIDDAY + timedelta(minutes=1)]
        assert due.dropped is None


def test_missed_ticks_are_skipped_merged_or_caught_up():
    now = MIDDAY + timedelta(hours=2, minutes=30)
    one_pm, two_pm = MIDDAY + timedelta(hours=1), MIDDAY + timedelta(hours=2)
    skipping = schedule("0 * * * *", missed="skip").choose(MIDDAY, now)
    assert (skipping.ticks, skipping.until) == ([], two_pm)
    assert skipping.dropped == (one_pm, now)
    merging = schedule("0 * * * *", missed="one").choose(MIDDAY, now)
    assert (merging.ticks, merging.dropped) == ([two_pm], (one_pm, two_pm))
    catching_up = schedule("0 * * * *", missed="all").choose(MIDDAY, now)
    assert (catching_up.ticks, catching_up.dropped) == ([one_pm, two_pm], None)


@pytest.mark.parametrize("cron", ["* * * * * *", "0 3 * * *"])
def test_only_the_newest_thousand_of_too_many_ticks_are_enqueued(cron):
    made = schedule(cron, missed="all")
    now = MIDDAY + timedelta(days=4_000)
    due = made.choose(MIDDAY, now)
    assert len(due.ticks) == MOST_TICKS
    assert due.ticks == sorted(due.ticks)
    assert due.until == due.ticks[-1]
    assert made.next(due.ticks[-1]) > now
    assert due.dropped == (made.next(MIDDAY), due.ticks[0])
    # No tick between them is skipped.
    assert [made.next(tick) for tick in due.ticks[:-1]] == due.ticks[1:]


def test_a_thousand_are_counted_from_the_last_one_in_a_repeated_hour():
    made = schedule("30 2 * * *", "Europe/Zurich", missed="all")
    # This is 2:10 for the second time: today's tick was at the first 2:30.
    now = datetime(2025, 10, 26, 2, 10, tzinfo=ZURICH, fold=1).astimezone(UTC)
    due = made.choose(now - timedelta(days=2_000), now)
    assert local(made, due.ticks[-1:]) == ["02:30+0200"]
    assert now - due.ticks[-1] == timedelta(minutes=40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cron": "* * * *"}, ["'* * * *'", "wrong number of fields", "30 3 * *"]),
        ({"cron": "61 * * * *"}, ["'61 * * * *'", "bad minute"]),
        ({"cron": "0 0 30 2 *"}, ["'0 0 30 2 *'"]),
        ({"cron": ""}, ["wrong number of fields"]),
        ({"tz": "Europe/Zurch"}, ["'Europe/Zurch'", "Europe/Zurich"]),
        ({"tz": "Europe"}, ["'Europe'"]),
        ({"tz": "../etc/passwd"}, ["time zone"]),
        ({"tz": ""}, ["time zone ''"]),
        ({"missed": "none"}, ["'none'", "'skip', 'one' or 'all'"]),
        ({"name": ""}, ["''", "1 to 200"]),
        ({"name": "n" * 201}, ["1 to 200"]),
        ({"payload": {"regoin": "eu"}}, ["regoin"]),
        ({"payload": {"region": 7}}, ["region"]),
        ({"payload": {"tick": MIDDAY}}, ["'tick'", "leave it out"]),
    ],
)
def test_an_invalid_schedule_is_refused_at_declaration(options, words):
    with pytest.raises(ConfigurationError) as refused:
        schedule(**({"cron": "* * * * *"} | options))
    for word in words:
        assert word in str(refused.value)


def test_a_taken_name_and_an_unknown_job_type_are_refused():
    app, other = App("test"), App("other")

    @other.job()
    def foreign(job: Job) -> None: ...

    @app.periodic("0 3 * * *")
    @app.job()
    def work(job: Job, region: str = "") -> None: ...

    with pytest.raises(ConfigurationError, match="'work' is declared twice: give one"):
        app.periodic("0 4 * * *")(work)
    app.periodic("0 4 * * *", name="work-eu", payload={"region": "eu"})(work)
    assert sorted(app.schedules) == ["work", "work-eu"]
    with pytest.raises(ConfigurationError, match="'foreign' is not one of the app"):
        app.periodic("0 3 * * *")(foreign)
    with pytest.raises(ConfigurationError, match=r"put @app.periodic above @app.job"):
        app.periodic("0 3 * * *")(lambda job: None)  # type: ignore[arg-type]


def test_a_payload_that_json_has_no_form_for_is_refused():
    app = App("test")

    @app.job()
    def climb(job: Job, to: Height) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"'climb' cannot enq.*to\.metres is N"
    ):
        app.periodic("0 3 * * *", payload={"to": Height(metres=math.nan)})(climb)


def test_a_handler_with_a_tick_that_is_no_time_is_refused():
    app = App("test")

    @app.job()
    def work(job: Job, tick: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'work' cannot enqueue: .*tick"):
        app.periodic("* * * * *")(work)
    assert app.schedules == {}
