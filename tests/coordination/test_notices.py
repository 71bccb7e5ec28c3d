"""A listener learns what a member holds, whatever it does with it."""

from __future__ import annotations

import threading

import pytest

from jobs_lib.coordination.messages import Shared
from jobs_lib.coordination.notices import Notices

WAIT = 30.0
ORDERS = Shared("shop.mailer", "orders", 0)


@pytest.fixture
def notices():
    """A thread that tells a listener."""
    made = Notices("shop.mailer")
    made.start()
    yield made
    made.stop(WAIT)


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_listener_that_fails_is_told_of_the_next_notice(notices, error):
    told = threading.Event()

    def lost(shared: Shared) -> None:
        raise error(1)

    notices.put(lost, ORDERS)
    notices.put(lambda shared: told.set(), ORDERS)
    assert told.wait(WAIT)


def test_a_listener_may_stop_its_member(notices):
    stopped = threading.Event()

    def ended(error: Exception) -> None:
        notices.stop(WAIT)
        stopped.set()

    notices.put(ended, ValueError("another process has this name"))
    assert stopped.wait(WAIT)
