"""What the API answers when a request fails: application/problem+json (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import psycopg
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from examples.tenants.tenants import TakenError
from jobs_lib import (
    PayloadError,
    RefusedError,
    RequestConflictError,
    TopicError,
    UnavailableError,
    UnknownPublishError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

RETRY_AFTER = "1"
"""Seconds after which a caller may try again."""


def answer_problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with a problem."""
    return JSONResponse(
        {"status": status, "title": HTTPStatus(status).phrase, "detail": detail},
        status,
        headers,
        media_type="application/problem+json",
    )


def _answer_plain(_: Request, error: Exception) -> Response:
    """Answer to what Starlette refuses, such as a path that it does not know."""
    assert isinstance(error, HTTPException)
    return answer_problem(error.status_code, error.detail, error.headers)


def _answer_form(_: Request, error: Exception) -> Response:
    """Name the fields that are wrong, without their values."""
    assert isinstance(error, ValidationError)
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    told = [
        f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in faults
    ]
    return answer_problem(422, "; ".join(told))


def _answer_taken(_: Request, error: Exception) -> Response:
    return answer_problem(409, str(error))


def _answer_refused(_: Request, error: Exception) -> Response:
    return answer_problem(422, str(error))


def _answer_conflict(_: Request, error: Exception) -> Response:
    return answer_problem(422, "the request id was used before with another body")


def _answer_unknown(_: Request, error: Exception) -> Response:
    """Nobody knows whether the event is there: the same request id finds out."""
    return answer_problem(
        503,
        "it is not known whether this was done: repeat it with the same request id",
        {"Retry-After": RETRY_AFTER},
    )


def _answer_away(_: Request, error: Exception) -> Response:
    """Nothing was sent: Kafka or the database does not answer, or has no topic yet."""
    return answer_problem(
        503,
        "this cannot be done now: repeat it with the same request id",
        {"Retry-After": RETRY_AFTER},
    )


def _answer_fault(_: Request, error: Exception) -> Response:
    return answer_problem(500, "a fault of the service: its log says more")


HANDLERS = {
    HTTPException: _answer_plain,
    ValidationError: _answer_form,
    TakenError: _answer_taken,
    RefusedError: _answer_refused,
    PayloadError: _answer_refused,
    RequestConflictError: _answer_conflict,
    UnknownPublishError: _answer_unknown,
    UnavailableError: _answer_away,
    TopicError: _answer_away,
    psycopg.OperationalError: _answer_away,
    Exception: _answer_fault,
}
"""By error, what answers to it."""
