"""Import the names of a package at their first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ConfigurationError
from jobs_lib.extras import explain_missing

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
        ConfigurationError: it needs a database driver, and none is installed.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{package}.{modules[name]}")
    except ModuleNotFoundError as error:
        if told := explain_missing(error):
            raise ConfigurationError(told) from None
        raise
    value = getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
