"""Commands of an app that a test has made."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from click.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    import click
    import pytest

    from jobs_lib import App


def make_runner(
    group: click.Group, app: App, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Make a function that runs a command on the app, and returns what it prints."""
    module = types.ModuleType("service_of_test")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service_of_test", module)
    monkeypatch.setenv("JOBS_LIB_APP", "service_of_test:app")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(group, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run
