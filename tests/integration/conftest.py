"""An app on the fresh database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import App


@pytest.fixture
def app(database_url: str) -> App:
    """An app with quick settings, to which a test adds its types."""
    return make_app(database_url)
