"""The payments, and what each service should know of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.flights.flights import read_flights

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Payment:
    """One payment; it is also the value of a record of the topic ``payments``."""

    id: int
    payer: str
    """It is the key of the record, so the payments of a payer keep their order."""
    payee: str
    cents: int


@dataclass(frozen=True, slots=True)
class Known:
    """What the other services know of a payment."""

    times: int
    """How often this payer has paid this payee, with this payment."""
    payments: int
    """How many payments the payer has made, with this one."""
    cents: int
    """What they sum up to."""


def read_payments(limit: int | None = None) -> list[Payment]:
    """The first flights of the year as payments, or all 336,776.

    The aircraft pays its destination, and the number of the flight is the amount.
    """
    return [
        Payment(flight.id, flight.key, flight.destination, 100 * flight.number)
        for flight in read_flights(limit)
    ]


def expect(payments: Iterable[Payment]) -> dict[int, Known]:
    """What should be known of each payment, by its id."""
    times: dict[tuple[str, str], int] = defaultdict(int)
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    expected = {}
    for one in payments:
        times[one.payer, one.payee] += 1
        count, cents = totals[one.payer]
        totals[one.payer] = count + 1, cents + one.cents
        expected[one.id] = Known(times[one.payer, one.payee], *totals[one.payer])
    return expected
