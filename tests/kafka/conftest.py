"""A broker of these tests alone, which they may kill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import brokers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def own_broker() -> Iterator[brokers.OwnBroker]:
    """A broker that may be killed; whoever does so starts it again."""
    with brokers.own_broker() as broker:
        yield broker
