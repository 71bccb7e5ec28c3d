"""Find a declared read model that is asked for answers."""

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


def refuse_other_keys(declared: Iterable[Subscription], asked: Subscription) -> None:
    """Refuse answers of a table whose versions know its keys in different ways.

    A switch gives the table that readers see to another version. Answers, whose
    function is one version's, ask that table then.

    Raises:
        ConfigurationError: another version has another key, or its versions elsewhere.
    """
    for one in declared:
        if not one.is_read_model or one.first_table != asked.first_table:
            continue
        if _find_key(one) != _find_key(asked):
            told = " and ".join(
                f"version {each.version.number} has {_describe_key(each)}"
                for each in sorted((one, asked), key=lambda one: one.version.number)
            )
            raise ConfigurationError(
                f"answers from the table {asked.first_table!r} would fail once readers "
                f"see another version of it: {told}. Give all versions the same "
                "`key`, `key_type` and `versions`, or a new `table` to the new one"
            )


def _find_key(declared: Subscription) -> tuple[bool, str | None, object]:
    """How the keys of a read model are known: by a column, or beside the table."""
    table = declared.tables[0]
    column = None if table.versions_beside else table.key
    return table.versions_beside, column, declared.model and declared.model.key_type


def _describe_key(declared: Subscription) -> str:
    beside, column, key_type = _find_key(declared)
    place = "beside the table" if beside else f"in the column {column!r}"
    return f"keys of {getattr(key_type, '__name__', key_type)} {place}"


def _is_meant(declared: Subscription, model: object) -> bool:
    if isinstance(model, str):
        return model in declared.plain_tables
    return declared.model is not None and declared.model.function is model


def _name(model: object) -> str:
    return str(getattr(model, "__name__", f"a {type(model).__name__}"))
