"""Servers for development stop, each whatever becomes of the others."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jobs_lib.devstack.stack import start_together
from jobs_lib.errors import DevStackError


class Server:
    """A server that does not come up, and perhaps cannot be stopped."""

    running = False

    def __init__(self, *, stays: bool = False) -> None:
        self.stays, self.stops = stays, 0

    def start(self) -> None:
        raise DevStackError("it does not come up")

    def stop(self) -> None:
        self.stops += 1
        if self.stays:
            raise DevStackError("it cannot be stopped")


def test_a_server_that_cannot_be_stopped_keeps_no_other_one():
    servers = [Server(), Server(stays=True), Server()]
    with pytest.raises(DevStackError, match="cannot be stopped"):
        start_together(cast("Any", servers))
    assert [one.stops for one in servers] == [1, 1, 1]
