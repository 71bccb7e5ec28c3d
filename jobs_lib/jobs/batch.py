"""Batch handlers: one call for several jobs of a type."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.jobs.job import Job

T = TypeVar("T")


@dataclass(slots=True)
class Item(Generic[T]):
    """One of the jobs of a call of a batch handler."""

    job: Job
    payload: T = field(repr=False)
    failure: BaseException | None = field(default=None, repr=False)

    def fail(self, error: BaseException) -> None:
        """Fail this job alone: it is retried by its type's rules.

        ``Snooze``, ``Discard``, ``Cancel`` and ``RetryAfter`` have the same meaning as
        when they are raised.
        """
        self.failure = error


def find_item_type(
    function: Callable[..., Any], name: str, names: Mapping[str, object]
) -> Any:
    """Find the payload's type in a handler's only parameter, ``list[Item[T]]``.

    Raises:
        ConfigurationError: the handler has another signature.
    """
    way_out = (
        f"the batch handler of {name!r} must be a plain function of one parameter "
        "that is annotated as list[Item[T]], T being the type of the payload"
    )
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 1 or inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{way_out}: it takes {inspect.signature(function)}")
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        known = {**getattr(function, "__globals__", {}), **names}
        try:
            # The text is an annotation in the app's own source.
            annotation = eval(annotation, known)  # noqa: S307
        except NameError as error:
            raise ConfigurationError(f"{way_out}: {error}") from None
    of_list = get_args(annotation)
    if get_origin(annotation) is not list or get_origin(of_list[0]) is not Item:
        raise ConfigurationError(f"{way_out}: it takes {parameters[0]}")
    return get_args(of_list[0])[0]


def make_schema(item_type: Any) -> Callable[..., Any]:
    """Make a function whose signature is the schema of one item's payload."""

    def handler(job: Job, payload: Any) -> None: ...

    handler.__annotations__ = {"payload": item_type}
    return handler
