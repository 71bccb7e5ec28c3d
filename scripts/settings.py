"""Write docs/settings.md from the fields of `jobs_lib.settings.Settings`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from jobs_lib.settings import Settings
from scripts import page

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

SOURCE = "jobs_lib/settings.py"

HEAD = """# Settings

A setting is read from the environment, else from the TOML file that
`JOBS_LIB_CONFIG_FILE` names (`jobs_lib.toml` in the working folder by default). In
the file its name is in lower case, without `JOBS_LIB_`. A value that code passes to
`load_settings`, by the same name, wins over both. A setting of Kafka's client that
loads code or runs a command, such as `plugin.library.paths`, is taken only from the
environment or from a file that it names. All settings are checked when they are first
read, and one error names all wrong ones.
{exceptions}
| Variable | Default | Values | Meaning |
| --- | --- | --- | --- |
"""

# Defaults that depend on the machine.
COMPUTED = {"pod": "the machine's name"}
KINDS = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}


def main() -> int:
    """Write the page, or check it with ``--check``."""
    rows = (row(name, field) for name, field in Settings.model_fields.items())
    head = HEAD.format(exceptions=exceptions())
    return page.main(PAGE, SOURCE, head + "".join(rows))


def exceptions() -> str:
    """A line for each setting whose name in the file is not the variable's."""
    named = {
        variable(name, field): name for name, field in Settings.model_fields.items()
    }
    return "".join(
        f"In the file and in code `{one}` is `{name}`.\n"
        for one, name in named.items()
        if one != f"JOBS_LIB_{name.upper()}"
    )


def variable(name: str, field: FieldInfo) -> str:
    """The setting's environment variable."""
    alias = field.validation_alias
    return alias if isinstance(alias, str) else f"JOBS_LIB_{name.upper()}"


def row(name: str, field: FieldInfo) -> str:
    """One setting as a row of the table."""
    cells = (
        f"`{variable(name, field)}`",
        COMPUTED.get(name) or default(field),
        values(field),
        field.description or "",
    )
    return f"| {' | '.join(map(page.cell, cells))} |\n"


def default(field: FieldInfo) -> str:
    """A setting's default value, as its cell of the table."""
    value = field.get_default(call_default_factory=True)
    return "none" if value in ("", None) else f"`{value}`"


def values(field: FieldInfo) -> str:
    """The kind and the bounds of a field's values."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(field.annotation))
    kind = next(
        (text for one, text in KINDS.items() if field.annotation is one), "JSON"
    )
    low, high = "", ""
    for bound in field.metadata:
        match bound:
            case Ge(least) | MinLen(least):
                low = f"from {least:,}"
            case Gt(least):
                low = f"above {least:,}"
            case Le(most) | MaxLen(most):
                high = f"to {most:,}"
    unit = " characters" if kind == "text" and (low or high) else ""
    return f"{kind} {low} {high}".strip() + unit


if __name__ == "__main__":
    sys.exit(main())
