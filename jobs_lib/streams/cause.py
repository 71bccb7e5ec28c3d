"""What a publish is a part of: a job that runs, or a record that is handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from uuid import UUID, uuid5

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from uuid import UUID as Id


class Cause(Protocol):
    """A job or a record, which may be handled again after its event was published."""

    @property
    def idempotency_key(self) -> str:
        """The same each time that it is handled."""

    def ensure_may_publish(self) -> None:
        """Refuse to publish where the event could be wrong, or stay without its change.

        Raises:
            JobsError: it could.
        """


def derive_request(cause: Cause, key: str) -> str:
    """Derive the id of a request from what causes it, and the key of the entity."""
    return str(uuid5(UUID(cause.idempotency_key), key))


def number_request(id_: str, number: int) -> str:
    """The id of the nth event of a cause and key; they differ only by what they say."""
    return id_ if number == 1 else f"{id_}/{number}"


def check_cause(name: str, request: str | Id | None, by: Cause | None) -> None:
    """Refuse a publish that has both a cause and an id, or a cause that is over.

    Raises:
        ConfigurationError: it has both.
        JobsError: the cause may not publish.
    """
    if by is None:
        return
    if request is not None:
        raise ConfigurationError(
            f"an event of {name!r} is given both `request` and `by`: the job or record "
            "gives it the id of its request, so leave `request` out"
        )
    by.ensure_may_publish()
