"""Rate limits: a number of starts of a job type in some seconds, over all pods."""

from __future__ import annotations

from dataclasses import dataclass

from jobs_lib.backoff import is_number

LEASED = 0.2
"""Seconds for which starts that were taken ahead stay valid."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Lets ``starts`` jobs start in ``per`` seconds, over all pods.

    In any period, as many may start as the rate allows for it, and those of one more
    second (at least one) as a burst after a quiet time.
    """

    starts: int
    """The number of starts."""
    per: float = 1.0
    """The seconds for these starts. Defaults to one."""

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
        """The number of starts in a second."""
        return self.starts / self.per

    @property
    def capacity(self) -> float:
        """The bucket's size; with the starts taken ahead it is one second's worth."""
        return max(1.0, self.per_second * (1 - LEASED))
