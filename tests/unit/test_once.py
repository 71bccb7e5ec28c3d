"""How the event of a request is sent once, whatever its parts do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from jobs_lib.errors import UnavailableError
from jobs_lib.streams.event import Event
from jobs_lib.streams.once import Call, Once
from jobs_lib.streams.steps import run, run_async
from tests.support.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.streams.event import Published
    from jobs_lib.streams.steps import Steps

SECONDS = 12.0
"""How long a sender may take."""


class Requests:
    """Remembers one request; each statement takes some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.attempts = 0
        self.forgotten: list[int] = []

    def find(self, *_: object) -> None:
        """Find nothing."""

    def add(self, *_: object) -> int:
        """Remember the request."""
        return self.take()

    def take(self, *_: object) -> int:
        """Take it over."""
        self._clock.now += self._seconds
        self.attempts += 1
        assert self.attempts < 1_000, "it never ends"
        return self.attempts

    def forget(self, _: Event, id_: str, attempt: int) -> None:
        """Note that it is forgotten."""
        self.forgotten.append(attempt)


def _nothing(answer: Any) -> Iterator[Any]:
    """Steps that have an answer at once."""
    return answer
    yield


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock by which requests are sent."""
    clock = Clock()
    monkeypatch.setattr("jobs_lib.streams.once.time", clock)
    return clock


@pytest.mark.guarantee("T14")
@pytest.mark.parametrize(
    "finish",
    [run, lambda steps: asyncio.run(run_async(steps))],
    ids=["publish", "publish_async"],
)
def test_a_publish_ends_although_the_database_remembers_it_too_slowly_each_time(
    clock: Clock, finish: Callable[[Steps[Published]], Published]
):
    requests: Any = Requests(clock, seconds=1.1)
    publisher = Mock(prepare=lambda *_: _nothing(1))
    once = Once(
        publisher,
        Mock(choose_partition=lambda _: 0, note_end=lambda *_: 3),
        requests,
        Mock(check=lambda *_: _nothing(False)),
        lambda _: 1,
        SECONDS,
    )
    stream: Any = SimpleNamespace(rules=SimpleNamespace(acks="all"))
    call = Call(stream, Event("orders", "k", b"{}", {}, []), {}, "r1", None)
    began = clock.now
    with pytest.raises(UnavailableError, match=r"'r1'.*Nothing was sent"):
        finish(once.publish(call))
    assert clock.now - began < 2 * SECONDS
    publisher.send.assert_not_called()
    assert requests.forgotten == [requests.attempts]
