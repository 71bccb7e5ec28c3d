"""Print rows as a table for people, or as JSON for programs."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

# In a pipe or a file every value is complete, and each row is one line.
_PIPE_WIDTH = 1_000_000


def show(
    columns: Iterable[str], rows: Iterable[tuple[Any, ...]], as_json: bool
) -> None:
    """Print rows as a table, or as JSON: a list of objects.

    On a terminal the table is as wide as the terminal, and long values are cut.
    Elsewhere all values are complete.
    """
    names = list(columns)
    if as_json:
        show_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    _console().print(_table(names, rows))


def watch(
    columns: Iterable[str],
    read: Callable[[], Iterable[tuple[Any, ...]]],
    seconds: float,
    explain: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Print rows as a table, again and again in the same place, until Ctrl-C.

    In a pipe or a file the tables follow each other.

    Args:
        columns: their names.
        read: reads the rows.
        seconds: between two tables.
        explain: returns lines to stand above the table that was read last.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    names, console = list(columns), _console()
    pause = threading.Event()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="visible") as live,
    ):
        while True:
            table = _table(names, read())
            shown = Group(*map(Text, explain()), table)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            pause.wait(seconds)


def _table(names: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> Table:
    from rich.table import Table

    found = list(rows)
    table = Table()
    for place, name in enumerate(names):
        # A cut number would be another number, so only other columns are cut.
        is_number = all(isinstance(row[place], int | None) for row in found)
        table.add_column(name, no_wrap=is_number)
    for row in found:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: object) -> Text:
    from rich.text import Text

    text = printable(value).replace("\n", "\\n")
    return Text(text, no_wrap=True, overflow="ellipsis")


def _console() -> Console:
    # Imported here: commands that print no table do not need it.
    from rich.console import Console

    return Console(width=None if Console().is_terminal else _PIPE_WIDTH)


def show_json(value: object) -> None:
    """Print a value as JSON; times in ISO 8601."""
    click.echo(json.dumps(value, default=_encode))


def printable(value: object) -> str:
    """Turn a value into text without control characters, even from an error's text."""
    if value is None:
        return ""
    text = str(value)
    if hasattr(value, "isoformat"):
        text = value.isoformat(sep=" ", timespec="seconds")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _encode(value: object) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
