"""Processes beside a test: the app that each declares, and its parts that run."""

from __future__ import annotations

import inspect
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jobs_lib import telemetry
from tests.support.signals import strike

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib import App

    Declare = TypeVar("Declare", bound=Callable[..., None])


@dataclass(frozen=True)
class Kind:
    """A function that declares an app, and how the app runs."""

    declare: Callable[..., None]
    parts: tuple[str, ...]
    settings: dict[str, Any]
    is_sidecar: bool

    @property
    def options(self) -> set[str]:
        """The parameters of the function besides the app."""
        return {*inspect.signature(self.declare).parameters} - {"app"}


KINDS: dict[str, Kind] = {}
"""The kinds by the names of their functions."""


def kind(
    *parts: str, is_sidecar: bool = False, **settings: Any
) -> Callable[[Declare], Declare]:
    """A process that runs these parts of the app that the function declares.

    Unless the test gives others, the app has these settings.
    """

    def add(declare: Declare) -> Declare:
        assert declare.__name__ not in KINDS
        KINDS[declare.__name__] = Kind(declare, parts, settings, is_sidecar)
        return declare

    return add


def die() -> None:
    """Kill this process."""
    strike(signal.SIGKILL)


def die_at(events: Mapping[str, int]) -> None:
    """Kill this process when an event has come as often as its number says."""
    left = dict(events)

    def count(event: str, _: dict[str, Any]) -> None:
        if event in left:
            left[event] -= 1
            if not left[event]:
                die()

    telemetry.listen(count)


def home_of(app: App) -> str:
    """The topic whose partitions are the origins."""
    assert app.home is not None
    return app.home
