"""Import the names of a package at their first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def import_name(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Import a name of a package, which keeps it from then on.

    Args:
        package: its full name.
        modules: by name, the module of the package that has it.
        name: that was asked for.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
    setattr(sys.modules[package], name, value)
    return value
