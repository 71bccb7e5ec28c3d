"""The command ``jobs-lib reexport pack``, and options that name what Spark is given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs_lib.errors import ReexportError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECRET = re.compile(r"(?i)(?:secret(?:\.key)?|password|token|credentials?)$")
_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@|\bpassword=")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--module",
    "modules",
    metavar="NAME",
    multiple=True,
    help="Also pack a module of yours, for DataFrames; as often as needed.",
)
def pack(file: Path, modules: tuple[str, ...]) -> None:
    """Pack the library for workers of Spark that have none, for start --packed FILE.

    FILE ends in .tar.gz. The workers need a Python of the same version.
    """
    from spark_bridge.pack import ARCHIVES, FOLDER, PATH
    from spark_bridge.pack import pack as write

    size = write(file, modules)
    click.echo(
        f"{file}: {size / 1e6:,.0f} MB. Start with --packed {file}; give spark-submit "
        f"--conf {ARCHIVES}={file}#{FOLDER} --conf {PATH}={FOLDER}"
    )


def read_conf(given: Iterable[str]) -> dict[str, str]:
    """Read the settings of Spark that options name.

    Raises:
        ReexportError: one is none, or a secret that others could see here.
    """
    found = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name.startswith("spark."):
            raise ReexportError(
                f"a setting of Spark is spark.NAME=VALUE, not {name!r}: such as "
                "spark.speculation=true"
            )
        if _SECRET.search(name) or _URL.search(value):
            raise ReexportError(
                f"{name} has a secret, and everybody on this machine may read command "
                "lines: write it into conf/spark-defaults.conf, in SPARK_CONF_DIR"
            )
        found[name] = value
    return found
