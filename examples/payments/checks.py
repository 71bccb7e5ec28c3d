"""The facts at the end of the demo, as pure functions of the data that were found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from examples.flights.checks import Fact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from examples.payments.payments import Known


def nothing_missing(missing: Mapping[str, int]) -> Fact:
    """No API was asked for what it did not know yet."""
    return Fact(
        "no call met missing data",
        not any(missing.values()),
        ", ".join(f"{name} {count}" for name, count in missing.items()),
    )


def handled_once(expected: Mapping[int, Known], handled: Sequence[int]) -> Fact:
    """Each payment was handled, and none twice."""
    times = Counter(handled)
    lacking = len(expected.keys() - times.keys())
    twice = sum(count > 1 for count in times.values())
    return Fact(
        "detection handled every payment once",
        times.keys() == expected.keys() and not twice,
        f"{len(times):,} payments, {lacking} lacking, {twice} twice",
    )


def answers_right(
    expected: Mapping[int, Known], found: Mapping[int, Known | None]
) -> Fact:
    """Both APIs said what follows from the payments up to that one."""
    wrong = sum(found.get(number) != known for number, known in expected.items())
    return Fact(
        "detection was told the right data of every payment",
        not wrong,
        f"{len(found):,} answers, {wrong} wrong",
    )


def others_complete(expected: Mapping[int, Any], counts: Mapping[str, int]) -> Fact:
    """The other services have handled each payment as well."""
    return Fact(
        "the other services know every payment",
        set(counts.values()) == {len(expected)},
        ", ".join(f"{name} {count:,}" for name, count in counts.items()),
    )


def last_handled(ends: Mapping[int, int], handled: Mapping[int, int]) -> Fact:
    """The last record of each partition was handled."""
    lasts = {number: end - 1 for number, end in ends.items() if end}
    reached = sum(handled.get(number) == last for number, last in lasts.items())
    return Fact(
        "detection handled the last record of each partition",
        bool(lasts) and reached == len(lasts),
        f"{reached} of {len(lasts)} partitions",
    )
