"""Each command that a message names with arguments has all that the command needs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from jobs_lib.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parents[2]
FOLDERS = ("jobs_lib", "migrations", "spark_bridge")
COMMAND = re.compile(r"`jobs-lib ([^`]+)`|\Ajobs-lib ([^`:,]+)\Z")
"""Within a message, or the whole of it."""


def read_text(node: ast.AST) -> str | None:
    """The text of a literal, with X for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(read_text(one) or "" for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return "X"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def find_texts(node: ast.AST) -> Iterator[str]:
    """Yield each literal text, whole, without docstrings."""
    for child in ast.iter_child_nodes(node):
        text = read_text(child)
        if text is not None:
            yield text
        elif not isinstance(child, ast.Expr) or read_text(child.value) is None:
            yield from find_texts(child)


def find_commands() -> Iterator[str]:
    for path in (one for name in FOLDERS for one in (HERE / name).rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        # Each process that collects tests does this: parse only what has a command.
        for text in find_texts(ast.parse(code)) if "jobs-lib " in code else ():
            for told in COMMAND.finditer(text):
                yield " ".join((told[1] or told[2]).split())


def find_fault(words: list[str]) -> str | None:
    """Find what click would refuse; a command named without arguments is in order."""
    command: click.Command = cli
    context = click.Context(cli, info_name="jobs-lib")
    while words and isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        if found is None:
            return f"there is no command {words[0]}"
        command, words = found, words[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    if not words or words == ["-h"]:
        return None
    try:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.format_message()
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    missing = [
        one.human_readable_name
        for one in arguments
        if one.required and not isinstance(given.get(str(one.name)), str | tuple)
    ]
    if missing or rest:
        return f"missing {missing}, left over {rest}"
    return None


def test_a_command_that_lacks_an_argument_is_found():
    assert find_fault(["topics", "declare", "TOPIC", "--partitions", "N"])
    assert find_fault(["topics", "declare", "M:A", "TOPIC", "--home"]) is None
    assert find_fault(["jobs", "retri"])
    assert find_fault(["jobs", "retry", "--everything"])


@pytest.mark.parametrize("command", sorted({*find_commands()}))
def test_each_command_that_a_message_names_can_be_run(command):
    assert find_fault(shlex.split(command)) is None
