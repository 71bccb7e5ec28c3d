"""Fixtures that the tests of plans share."""

from __future__ import annotations

import pytest

from tests.plans.owner import Owner


@pytest.fixture
def owner(database, admin):
    """An executor of its own, on the same kind of connection as executors use."""
    with database.connect("test", impatient=True) as connection:
        yield Owner(connection, database.queries, admin)
