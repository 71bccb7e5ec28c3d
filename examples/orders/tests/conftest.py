"""The shop's tables in the tests' database, made by its own migrations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

INI = Path(__file__).parents[1] / "alembic.ini"


@pytest.fixture(scope="session")
def jobs_database_setup() -> Callable[[str], None]:
    """Called once, with the URL of the database of which each test gets a copy."""

    def setup(url: str) -> None:
        with patch.dict(os.environ, {"JOBS_LIB_DATABASE_URL": url}):
            command.upgrade(Config(str(INI)), "head")

    return setup
