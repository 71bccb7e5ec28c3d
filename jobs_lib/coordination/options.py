"""What a consumer is given besides names: what cannot be used is refused."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal, get_args

from jobs_lib.backoff import Retry
from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

Delivery = Literal["at_least_once", "at_most_once"]
Start = Literal["earliest", "latest"]
LARGEST_BATCH = 10_000


def check_options(
    handle: object, delivery: str, batch: object, start: str, retry: object
) -> None:
    """Refuse what a consumer cannot be given.

    Raises:
        ConfigurationError: which, and why.
    """
    if not callable(handle) or _is_lazy(handle):
        raise ConfigurationError(
            f"handle={handle!r} must be a function, which is called with a list of "
            "records, and no coroutine function or generator"
        )
    if not isinstance(retry, Retry) or retry.max_attempts is not None:
        raise ConfigurationError(
            f"retry={retry!r} must be a Retry without max_attempts: a partition waits "
            "until its handler succeeds"
        )
    if delivery not in get_args(Delivery):
        raise ConfigurationError(
            f"delivery={delivery!r} must be one of {', '.join(get_args(Delivery))}"
        )
    if type(batch) is not int or not 1 <= batch <= LARGEST_BATCH:
        raise ConfigurationError(
            f"batch={batch!r} must be a number of records from 1 to {LARGEST_BATCH}"
        )
    if start not in get_args(Start):
        raise ConfigurationError(
            f"start={start!r} must be one of {', '.join(get_args(Start))}"
        )


def _is_lazy(handle: Callable[..., object]) -> bool:
    """Whether a call of it returns work instead of doing it."""
    return any(
        is_lazy(function)
        for is_lazy in (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        for function in (handle, type(handle).__call__)
    )
