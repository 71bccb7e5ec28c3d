"""All commands, for tests that try each of them."""

from __future__ import annotations

import click


def leaves(command: click.Command, *names: str) -> set[str]:
    """All commands below one."""
    if not isinstance(command, click.Group):
        return {" ".join(names)}
    context = click.Context(command)
    found = set()
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found |= leaves(inner, *names, name)
    return found
