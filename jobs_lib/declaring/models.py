"""Find a declared read model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.consuming.subscription import Subscription


def find_model(declared: Iterable[Subscription], model: object) -> Subscription:
    """Find a read model by its function, or by the name of one of its tables.

    Raises:
        ConfigurationError: it means none of them, or several.
    """
    models = [one for one in declared if one.model is not None]
    found = [one for one in models if _is_meant(one, model)]
    if len(found) == 1:
        return found[0]
    named = repr(model) if isinstance(model, str) else _name(model)
    what = "several read models" if found else "no read model"
    tables = sorted({name for one in models for name in one.plain_tables})
    raise ConfigurationError(
        f"{named} means {what} of this app: give the function below @app.read_model, "
        f"or the name of a table: {', '.join(tables) or 'there is none'}"
    )


def _is_meant(declared: Subscription, model: object) -> bool:
    if isinstance(model, str):
        return model in declared.plain_tables
    return declared.model is not None and declared.model.function is model


def _name(model: object) -> str:
    return str(getattr(model, "__name__", f"a {type(model).__name__}"))
