"""``python -m benchmarks.peers setup``: install the peers into the cache."""

from __future__ import annotations

import sys

import click

from benchmarks.peers.install import FOLDER, install


@click.group()
def main() -> None:
    """The other libraries that the benchmarks measure beside this one."""


@main.command()
def setup() -> None:
    """Install them by pip, npm (Linux x64), Go and Maven; skip what lacks its tool."""
    failed = install()
    for kind, reason in failed.items():
        click.echo(f"{kind}: not installed: {reason}", err=True)
    click.echo(f"peers are in {FOLDER}; remove that folder to be rid of them", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
