"""The waiting jobs, as a test sees them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.errors import PayloadError, StoredPayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from jobs_lib.jobs.type import JobType

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that waits for its run, or for another attempt."""

    id: int
    type: str
    payload: dict[str, Any]
    """The values, with the types and defaults of the handler's parameters."""
    group: str | None
    run_at: datetime | None
    attempt: int
    """Failed attempts so far."""

    def __str__(self) -> str:
        later = f" at {self.run_at:%Y-%m-%d %H:%M:%S%z}" if self.run_at else ""
        failed = f" after {self.attempt} failed attempts" if self.attempt else ""
        return f"{describe(self.type, self.payload)}{later}{failed}"


def read_payload(job_type: JobType[Any], text: str) -> dict[str, Any]:
    """A stored payload with the types and the defaults of the handler."""
    try:
        values = job_type.payload.decode(text)
    except StoredPayloadError:
        # Written by hand, or for another signature: shown as it is.
        return cast("dict[str, Any]", json.loads(text))
    return {
        name: values.get(name, parameter.default)
        for name, parameter in job_type.payload.signature.parameters.items()
    }


def check_fields(job_type: JobType[Any], payload: Mapping[str, Any]) -> None:
    """Refuse a misspelt field: no job has it, so some assertions would pass wrongly.

    Raises:
        PayloadError: the handler has no such parameter.
    """
    signature = job_type.payload.signature
    if unknown := payload.keys() - signature.parameters.keys():
        raise PayloadError(
            f"{job_type.name!r} takes {signature}, and no {', '.join(sorted(unknown))}"
        )


def describe(type_name: str, payload: Mapping[str, Any]) -> str:
    """A job as a call."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in payload.items())
    return f"{type_name}({arguments})"


def list_up(found: list[Enqueued]) -> str:
    """Jobs for a message."""
    if not found:
        return "nothing is"
    shown = [str(one) for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    return "enqueued are\n  " + "\n  ".join(shown)
