"""The hours in which a re-export is to be done, and the rate that does it."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from jobs_lib.errors import ReexportError
from jobs_lib.reexport import find_rate, find_span, parse_window

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN)


@pytest.mark.guarantee("W29")
@pytest.mark.parametrize(
    ("now", "begin", "end", "minutes"),
    [
        ("2026-07-01 12:00", "2026-07-01 22:00", "2026-07-02 06:00", 480),
        ("2026-07-01 22:00", "2026-07-01 22:00", "2026-07-02 06:00", 480),
        # What is left of the open one.
        ("2026-07-02 01:30", "2026-07-02 01:30", "2026-07-02 06:00", 270),
        ("2026-07-02 06:00", "2026-07-02 22:00", "2026-07-03 06:00", 480),
        # Clocks go forward, and back.
        ("2026-03-28 12:00", "2026-03-28 22:00", "2026-03-29 06:00", 420),
        ("2026-10-24 12:00", "2026-10-24 22:00", "2026-10-25 06:00", 540),
    ],
)
def test_a_window_is_open_now_or_lies_ahead(now, begin, end, minutes):
    window = parse_window("22:00-06:00", "Europe/Berlin")
    span = find_span(window, at(now).astimezone(UTC))
    assert (span.begin, span.end) == (at(begin), at(end))
    assert span.minutes == minutes


def test_a_window_within_a_day_and_one_of_this_machine():
    span = find_span(parse_window("1:00-01:30", "UTC"), at("2026-07-01 12:00"))
    assert span.begin == datetime(2026, 7, 2, 1, tzinfo=UTC)
    assert span.minutes == 30
    assert find_span(parse_window("00:00-23:59")).begin.tzinfo is not None
    assert str(parse_window("1:00-01:30")) == "01:00-01:30"


@pytest.mark.guarantee("W29")
def test_the_rate_sends_all_keys_in_the_window():
    span = find_span(parse_window("22:00-06:00", "UTC"), at("2026-07-01 12:00"))
    rate = find_rate(336_776, span)
    # A re-export reaches 97.5 % of its rate: with 336,776 / 480 it would end too late.
    assert rate == 720
    assert rate * 0.975 * 480 >= 336_776 > (rate - 1) * 0.975 * 480
    assert find_rate(0, span) == 1
    with pytest.raises(ReexportError, match="give a longer window"):
        find_rate(10**10, span)


@pytest.mark.parametrize(
    "text",
    ["", "22:00", "22:00-22:00", "24:00-06:00", "22:60-06:00", "22-6", "a:00-06:00",
     "22:00-06:00 ", "٢٢:00-06:00"],
)  # fmt: skip
def test_what_is_no_window_is_refused(text):
    with pytest.raises(ReexportError, match=r"such as 22:00-06:00"):
        parse_window(text)


@pytest.mark.parametrize("tz", ["", "Mars/North", "../etc", "Europe", "a\0b"])
def test_an_unknown_time_zone_is_refused(tz):
    with pytest.raises(ReexportError, match="no time zone"):
        parse_window("22:00-06:00", tz)
