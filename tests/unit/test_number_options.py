"""Options of commands that are numbers take finite ones alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.cli.options import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_options(
    command: click.Command, words: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield the type of each parameter of a command and of those below it."""
    for parameter in command.params:
        yield f"{words} {parameter.name}", parameter.type
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from list_options(below, f"{words} {name}")


def test_each_number_of_a_command_is_finite():
    numbers = {
        words: kind
        for words, kind in list_options(cli)
        if isinstance(kind, click.types.FloatParamType)
    }
    assert len(numbers) > 10
    assert {
        w for w, kind in numbers.items() if not isinstance(kind, FiniteRange)
    } == set()


@pytest.mark.parametrize("value", ["nan", "inf", "-nan"])
def test_what_is_no_finite_number_is_refused_by_name(value):
    words = ["coordination", "release", "g", "c", "--wait", value]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "Invalid value for '--wait'" in done.output


def list_helps(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, str]]:
    """Yield the help of a command and of those below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            inside = click.Context(below, info_name=name, parent=context)
            yield from list_helps(below, inside)


def test_the_help_of_a_number_without_bounds_names_no_range():
    helps = dict(list_helps(cli, click.Context(cli, info_name="jobs-lib")))
    assert "--delay SECONDS" in helps["jobs-lib jobs enqueue"]
    faulty = r"None|\[\]"
    assert {path for path, text in helps.items() if re.search(faulty, text)} == set()
    assert "[0<=x<=2147483646]" in helps["jobs-lib where"]
