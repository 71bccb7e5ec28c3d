"""The command line on the fresh database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.settings import default_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result


@pytest.fixture
def command(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """`command("jobs", "list")` runs `jobs-lib jobs list` in this process."""
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    default_settings.cache_clear()
    yield lambda *words: CliRunner().invoke(cli, words)
    default_settings.cache_clear()
