"""Errors that raise when they are printed, deny their own type, or are no errors."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from jobs_lib import Snooze

if TYPE_CHECKING:
    from collections.abc import Callable


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class ExitsWhenTold(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class NoText(Exception):
    def __str__(self):
        return 7


class NoClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self):
        raise RuntimeError("no class")


class NoTrace(Exception):
    @property
    def __traceback__(self):  # type: ignore[override]
        raise RuntimeError("no trace")

    __cause__ = __context__ = __traceback__


class Denied(Exception):
    def __bool__(self) -> bool:
        return False


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]

    @property
    def __name__(cls):  # type: ignore[override]
        raise RuntimeError("no name")


class OfOddClass(Exception, metaclass=Unhashable): ...


class SnoozeForNoTime(Snooze):
    def __init__(self) -> None: ...


class SnoozeForNaN(Snooze):
    def __init__(self) -> None:
        self.seconds = math.nan


def huge() -> Exception:
    return ValueError("\0\ud800" + 10_000_000 * "x")


def group() -> Exception:
    return ExceptionGroup("some", [Untold(), NoTrace()])


def odd_class() -> Exception:
    return OfOddClass()


ODD: list[Callable[[], BaseException]] = [
    Untold, ExitsWhenTold, NoText, NoClass, NoTrace, Denied, odd_class, huge, group,
    SnoozeForNoTime, SnoozeForNaN, SystemExit, GeneratorExit, KeyboardInterrupt,
    asyncio.CancelledError,
]  # fmt: skip


def raise_odd(n: int) -> None:
    """Raise the error of this number."""
    raise ODD[n]()
