"""The group whose lag pauses a re-export, and the limit of the lag."""

from __future__ import annotations

import time
from typing import cast

import pytest

from jobs_lib.errors import ReexportError
from jobs_lib.kafka import lag as kafka_lag
from jobs_lib.kafka.lag import ask_lag, count_lag
from jobs_lib.kafka.positions import KnownOffsets, Positions
from jobs_lib.reexport import LagLimit
from jobs_lib.reexport.control import parse_lag_limit
from tests.support.apps import make_app


@pytest.mark.parametrize("group", ["search", "a:b", "ü" * 124])
def test_a_limit_names_a_group_and_its_records(group):
    assert parse_lag_limit(f"{group}:10000") == LagLimit(group, 10_000)


@pytest.mark.parametrize(
    "group",
    # A shell gives bytes that are no UTF-8 as lone surrogates, and JSON has them, too.
    ["", "\udcff", "nul\0", "g" * 250, "ü" * 125],
)
def test_a_name_that_no_group_can_have_is_refused(group):
    with pytest.raises(ReexportError, match=r"name the group .* 1 to 249 bytes"):
        parse_lag_limit(f"{group}:1")


@pytest.mark.parametrize(
    "text", ["search", "search:", "search:x", "search:٣", ":", "search:" + 5_000 * "9"]
)
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ReexportError, match="GROUP:RECORDS"):
        parse_lag_limit(text)


@pytest.mark.parametrize("records", [0, 10**16])
def test_a_number_that_is_out_of_range_is_refused(records):
    with pytest.raises(ReexportError, match="must be 1 to"):
        parse_lag_limit(f"search:{records}")


@pytest.mark.guarantee("X9", "W31")
@pytest.mark.parametrize(
    ("starts", "committed", "lag"),
    [
        ({0: 0, 1: 5}, {0: 4}, 6 + 15),
        # The oldest records are gone, and the group had not handled them.
        ({0: 7, 1: 5}, {0: 4, 1: 5}, 3 + 15),
        # After a topic was made anew, the offsets are those of the former one.
        ({0: 0, 1: 5}, {0: 4, 1: 90}, 6 + 0),
        ({}, {}, 10 + 20),
        ({0: 0, 1: 5}, {0: 10, 1: 20}, 0),
    ],
)
def test_the_lag_is_that_of_all_partitions_of_a_topic(starts, committed, lag):
    assert count_lag(starts, {0: 10, 1: 20}, committed) == lag


class Answers:
    """Stands for a Kafka whose partition 1 may have no leader."""

    def __init__(
        self,
        starts: dict[int, int],
        ends: dict[int, int],
        committed: dict[int, int] | None = None,
        above: dict[int, int] | None = None,
    ) -> None:
        self._starts = starts
        self._ends = ends
        self._committed = committed or {0: 4}
        self._above = above or {}

    def ask_starts(self, topic: str, *, within: float) -> KnownOffsets:
        return KnownOffsets(2, self._starts, time.monotonic())

    def ask_ends(self, topic: str, *, within: float) -> KnownOffsets:
        return KnownOffsets(2, self._ends, time.monotonic())

    def ask_committed(self, group: str, topic: str, *, within: float) -> KnownOffsets:
        return KnownOffsets(2, self._committed, time.monotonic())

    def ask_handled(self, group: str, topic: str, *, within: float) -> KnownOffsets:
        return KnownOffsets(2, {}, time.monotonic(), self._above)


@pytest.mark.guarantee("W31")
@pytest.mark.parametrize(
    ("starts", "ends", "lag"),
    [
        ({0: 0, 1: 0}, {0: 10, 1: 20}, 6 + 20),
        ({0: 0, 1: 0}, {0: 10}, None),
        ({0: 0}, {0: 10, 1: 20}, None),
    ],
)
def test_the_lag_is_not_known_while_a_partition_has_no_leader(starts, ends, lag):
    positions = cast("Positions", Answers(starts, ends))
    assert ask_lag(positions, "orders", "search", within=6) == lag


@pytest.mark.parametrize(
    ("above", "lag"),
    [
        # The end was read before, or transactions are open behind it.
        ({}, 6),
        # The topic was made anew.
        ({1: 90}, 6 + 15),
    ],
)
def test_an_offset_of_the_topic_before_is_no_place_in_the_new_one(above, lag):
    answers = Answers({0: 0, 1: 5}, {0: 10, 1: 20}, {0: 4, 1: 90}, above)
    assert ask_lag(cast("Positions", answers), "orders", "search", within=6) == lag


@pytest.mark.parametrize(("later", "lag"), [(20, 6 + 15), (95, 6 + 5)])
def test_a_group_of_the_topic_before_is_behind(monkeypatch, later, lag):
    ends = iter([{0: 10, 1: 20}, {0: 10, 1: later}])

    def find(settings, topic, at):
        return {0: 0, 1: 5} if at == "start" else next(ends)

    monkeypatch.setattr(kafka_lag, "find_places", find)
    monkeypatch.setattr(kafka_lag, "_list_groups", lambda *_: ["search"])
    monkeypatch.setattr(kafka_lag, "read_committed", lambda *_: {0: 4, 1: 90})
    readers = kafka_lag.find_readers(make_app("").settings, "orders")
    assert readers.groups == [("search", lag)]
