"""Which types and origins may be claimed from at this moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.executor.section import Section

SKIP_PAUSE = 0.02
"""Seconds until a claim retries a locked origin; a cancel locks one, for example."""


class Scope:
    """Paused, skipped, unknown and foreign types and origins; used by one thread."""

    def __init__(
        self,
        section: Section,
        types: Iterable[str],
        foreign: Callable[[], frozenset[str]],
    ) -> None:
        """Know of no pause yet.

        Args:
            section: the section whose types are claimed.
            types: the types that have a handler here.
            foreign: returns the types that other apps know.
        """
        self.section = section
        self.paused: dict[str, frozenset[str]] = {}
        """The names of what is paused, by kind."""
        self._handled = sorted(types)
        self._own = sorted(section.types)
        self._others = sorted(section.others)
        self._get_foreign = foreign
        self._foreign: frozenset[str] = frozenset()
        self._resumes: int | None = None
        self._skipped: dict[str, float] = {}
        """Origins that the last claims skipped, and when they may be asked again."""
        self._unknown: dict[tuple[str, str], int] = {}
        """How many jobs of a type that nobody knows were met in an origin."""

    # Types

    @property
    def types(self) -> list[str]:
        """The types that may run now."""
        paused = self.paused.get("type", frozenset())
        return [name for name in self._own if name not in paused]

    @property
    def others(self) -> list[str]:
        """The types that other sections claim, and other apps."""
        return self._others

    @property
    def known(self) -> list[str]:
        """The types that somebody knows."""
        return [*self._handled, *self._foreign]

    @property
    def foreign(self) -> list[str]:
        """The types that other apps claim."""
        return list(self._foreign)

    def note_foreign(self) -> None:
        """Leave alone the types that other apps know now."""
        foreign = self._get_foreign()
        if foreign is not self._foreign:
            self._foreign = foreign
            self._others = sorted(self.section.others | foreign)

    def is_own(self, type_: str) -> bool:
        """Whether a type is neither another section's nor another app's."""
        return type_ not in self.section.others and type_ not in self._foreign

    def list_stuck_types(self, origin: str) -> list[str]:
        """The types whose jobs a jump passes over in an origin."""
        # An unknown type is claimed until the claim has reported it in this origin.
        told = {type_ for type_, lies in self._unknown if lies == origin}
        paused = self.paused.get("type", frozenset())
        return [*self._others, *paused, *told]

    def report_unknown(self, type_: str, origin: str, count: int) -> None:
        """Report jobs of a type that nobody knows, once for each origin."""
        key = type_, origin
        if key not in self._unknown:
            telemetry.emit("jobs.unknown", type=type_, origin=origin, count=count)
        self._unknown[key] = self._unknown.get(key, 0) + count

    # Origins

    def find_active(self, cursors: Mapping[str, Cursor]) -> dict[str, Cursor]:
        """The origins that may be claimed from now."""
        paused = self.paused.get("origin", frozenset())
        return {
            origin: cursor
            for origin, cursor in cursors.items()
            if not cursor.leaving and origin not in paused
        }

    def find_askable(self, cursors: Mapping[str, Cursor]) -> dict[str, Cursor]:
        """The active origins, except those that were skipped a moment ago."""
        active = self.find_active(cursors)
        if self._skipped:
            now = time.monotonic()
            self._skipped = {o: at for o, at in self._skipped.items() if now < at}
            return {o: p for o, p in active.items() if o not in self._skipped}
        return active

    def skip(self, origin: str) -> None:
        """Leave an origin alone for a moment: somebody had locked it."""
        self._skipped[origin] = time.monotonic() + SKIP_PAUSE

    @property
    def was_skipped(self) -> bool:
        """Whether claims must retry an origin soon."""
        return bool(self._skipped)

    # Pauses

    def pause(self, paused: dict[str, frozenset[str]], resumes: int) -> bool:
        """Note the pauses; return whether one has ended since the last time.

        Args:
            paused: names by kind, ``type`` or ``origin``.
            resumes: how often pauses have ended, those of groups included.
        """
        self.paused = paused
        resumed = self._resumes not in (None, resumes)
        self._resumes = resumes
        return resumed

    def parameters(self) -> dict[str, Any]:
        """The queries' parameter with the types left to other sections."""
        return {"others": self._others}
