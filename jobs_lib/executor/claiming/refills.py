"""Ask again for jobs that were passed over, once fewer of their value wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from jobs_lib.executor.claiming.passed import Passed


class Refills:
    """The jobs asked for by id because their value has room; for one thread."""

    def __init__(self, passed: Passed, parameter: str | None) -> None:
        """Ask for nothing yet.

        Args:
            passed: the jobs that were passed over.
            parameter: the field of the payload whose values are limited; None if no
                limit counts by value.
        """
        self.parameter = parameter
        self._passed = passed
        self._asked: dict[int, str] = {}
        """Ids and their values."""

    @property
    def suffix(self) -> str:
        """The suffix of queries that limit by value: see ``_read_queries``."""
        return "_limited" if self.parameter else ""

    def choose(
        self, active: Container[str], wanted: Mapping[int, str]
    ) -> dict[int, str]:
        """Ids to ask for, with their origins.

        Args:
            active: the origins that may be claimed from.
            wanted: ids with their origins that claims are still to ask for.
        """
        asked = self._asked.items()
        besides = {value for job_id, value in asked if wanted.get(job_id) in active}
        # The origins of these were paused or released before they were asked for.
        self._passed.hungry.update({*self._asked.values()} - besides)
        taken = self._passed.take(active, besides)
        self._asked |= {job_id: value for value, _, job_id in taken}
        return {job_id: origin for _, origin, job_id in taken}

    def parameters(self, ids: Iterable[int], suspect: int = 0) -> dict[str, Any]:
        """The parameters of the part ``unfull``: values with enough jobs waiting here.

        Args:
            ids: the ids that the claim asks for.
            suspect: the one of them that had room before, and waited for its turn.
        """
        if not self.parameter:
            return {"field": None}
        full = {*self._passed.full(), *self._passed.values}
        refilled = int_array(i for i in ids if i in self._asked or i == suspect)
        return {
            "field": self.parameter,
            "full": text_array([*full]),
            "refilled": refilled,
        }

    def forget_asked(self, left: Container[int]) -> None:
        """The claim has answered for its ids, except those that are ``left``."""
        if self._asked:
            # Some may have ended since; then there is room for more.
            asked = {v for i, v in self._asked.items() if i not in left}
            self._passed.hungry.update(asked)
            self._asked = {i: v for i, v in self._asked.items() if i in left}

    def clear(self) -> None:
        """Forget all."""
        self._asked.clear()
