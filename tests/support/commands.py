"""Commands of an app that a test has made."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import main
from jobs_lib.settings import default_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from jobs_lib import App

    Capture = pytest.CaptureFixture[str]


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


def fail_command(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, *words: str
) -> tuple[str, str]:
    """Run `jobs-lib` with these words, which exit code 2 must end; return its output.

    It is that for programs, and that for people.
    """
    default_settings.cache_clear()
    monkeypatch.setattr(sys, "argv", ["jobs-lib", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == 2, output.err
    return output.out, output.err
