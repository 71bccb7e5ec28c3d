"""Limits of rate: so many starts of a job type in so many seconds, over all pods."""

from __future__ import annotations

from dataclasses import dataclass

from jobs_lib.backoff import is_number

LEASED = 0.2
"""Seconds for which starts are good that were taken ahead."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many starts in so many seconds, over all pods.

    In any time as many may start as fit into it by the rate, and those of one second
    (at least one) more: a burst after a quiet time.
    """

    starts: int
    """How many may start."""
    per: float = 1.0
    """In how many seconds. Defaults to one."""

    def __post_init__(self) -> None:
        are_numbers = type(self.starts) is int and is_number(self.per)
        if not (
            are_numbers and 1 <= self.starts <= 1_000_000 and 0 < self.per <= 86_400
        ):
            raise ValueError(
                "a rate needs 1 to 1,000,000 starts in above 0 to 86,400 seconds, not "
                f"{self}"
            )

    @property
    def per_second(self) -> float:
        """How many may start in a second."""
        return self.starts / self.per

    @property
    def capacity(self) -> float:
        """How many the bucket holds; with those taken ahead it is a second's worth."""
        return max(1.0, self.per_second * (1 - LEASED))
