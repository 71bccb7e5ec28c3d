"""Checks of declared functions: they are refused here, not at their first call.

A handler that nobody awaits, or that is called with the wrong arguments, would fail
each job or lose each record, long after the mistake was made.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SELF = {"self", "cls"}
_JOB = {"job", "_job", "_"}
"""Names by which a parameter without an annotation is taken as the job."""


def refuse_misplaced(misplaced: tuple[object, ...], decorator: str) -> None:
    """Refuse positional arguments of a decorator: most often its parentheses are
    missing.

    Raises:
        ConfigurationError: there are any.
    """
    if not misplaced:
        return
    first = misplaced[0]
    if callable(first):
        name = getattr(first, "__name__", "the function")
        raise ConfigurationError(
            f"@{decorator} stands above {name} without parentheses: write "
            f"@{decorator}()"
        )
    raise ConfigurationError(
        f"@{decorator} was given {first!r} without a name: its arguments are given by "
        f"name, as in @{decorator}(name={str(first)!r})"
    )


def refuse_unfit(unfit: Mapping[str, object]) -> None:
    """Refuse arguments of ``app.batch`` that only ``app.job`` has, such as ``after``.

    Raises:
        ConfigurationError: there are any.
    """
    if unfit:
        names = ", ".join(f"`{name}`" for name in unfit)
        raise ConfigurationError(
            f"@app.batch takes no {names}: one call handles several jobs, which start "
            "together. Leave it out, or declare a type of single jobs by @app.job"
        )


def check_function(function: object, what: str) -> None:
    """Refuse a function whose call does nothing, or which lacks needed parameters.

    Args:
        function: the decorated function.
        what: names it in messages, as in ``the handler of 'charge'``.

    Raises:
        ConfigurationError: the function is neither a plain nor an async one.
    """
    if isinstance(function, staticmethod | classmethod):
        raise ConfigurationError(
            f"{what} is a {type(function).__name__} of a class: declare a function "
            "outside of the class, which calls it"
        )
    if not callable(function) or inspect.isclass(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigurationError(f"{what} must be a function, and is a {kind}")
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigurationError(
            f"{what} is a generator, and a call of one runs nothing: leave `yield` "
            "out, or loop over it in a function"
        )
    if inspect.iscoroutinefunction(inner) and not inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{what} is async, and the decorator around it is not, so nobody would "
            "await it: let the decorator return an `async def`"
        )
    first = next(iter(_read_signature(function, what).parameters), "")
    if first in _SELF:
        raise ConfigurationError(
            f"{what} is a method, and nobody has an object to call it on: declare a "
            f"function without {first!r} outside of the class"
        )


def check_plain(function: object, what: str) -> None:
    """Refuse an async function if nobody would await it.

    Raises:
        ConfigurationError: it is async, or no function at all.
    """
    check_function(function, what)
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{what} is async, and is called in a transaction that is not: make it a "
            "plain function, and enqueue a job with an async handler for what has to "
            "be awaited"
        )


def check_takes(
    function: Callable[..., Any], parameters: tuple[str, ...], what: str
) -> None:
    """Refuse a function that cannot be called with these positional parameters.

    Raises:
        ConfigurationError: it takes others.
    """
    signature = _read_signature(function, what)
    try:
        signature.bind(*parameters)
    except TypeError:
        name = getattr(function, "__name__", "function")
        raise ConfigurationError(
            f"{what} takes {signature}, and is called with "
            f"{' and '.join(parameters)}: write def {name}({', '.join(parameters)})"
        ) from None


def check_job(
    function: Callable[..., Any], names: Mapping[str, object], what: str
) -> None:
    """Refuse a handler whose first parameter is not the job.

    Args:
        function: the handler.
        names: for looking up annotations, besides the function's module.
        what: names the handler in messages.

    Raises:
        ConfigurationError: the first parameter is something else.
    """
    signature = _read_signature(function, what)
    first = next(iter(signature.parameters.values()), None)
    if first is None or not _may_be_job(first, function, names):
        name = getattr(function, "__name__", "function")
        others = ", ".join(str(one) for one in signature.parameters.values())
        raise ConfigurationError(
            f"{what} takes {signature}, and the first parameter of a handler is the "
            f"job: write def {name}(job: Job{', ' if others else ''}{others})"
        )


def _may_be_job(
    parameter: inspect.Parameter,
    function: Callable[..., Any],
    names: Mapping[str, object],
) -> bool:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return True  # a decorator's wrapper without functools.wraps
    if parameter.kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return False
    hint = parameter.annotation
    if hint is inspect.Parameter.empty:
        return parameter.name in _JOB
    while isinstance(hint, str):
        try:
            # The text is an annotation in the app's own source.
            hint = eval(hint, {**getattr(function, "__globals__", {}), **names})  # noqa: S307
        except Exception:  # imported for type checkers only
            return hint.rpartition(".")[2] not in {"str", "int", "float", "bytes"}
    return hint in (Any, object) or (
        inspect.isclass(hint) and (issubclass(Job, hint) or issubclass(hint, Job))
    )


def _read_signature(function: Callable[..., Any], what: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{what} has no signature that Python can read ({error}): call it in a "
            "function with named, annotated parameters"
        ) from None
