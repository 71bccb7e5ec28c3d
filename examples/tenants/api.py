"""The API: each change is one event, and is answered when Kafka has it.

uvicorn examples.tenants.api:web       the API alone
uvicorn examples.tenants.api:whole     with the processor in the same process
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from psycopg.rows import dict_row
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.tenants.problems import HANDLERS
from examples.tenants.processor import tenants_rm
from examples.tenants.tenants import Tenant, app, derive_id, refuse_known, tenants
from jobs_lib import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from jobs_lib import Published

EVENT, READ = "Tenant-Event", "Tenants-Read"
"""Headers: the place of an event, and how far the table is that was read."""

table = app.answers(tenants_rm)


class Form(BaseModel):
    """The body of a POST or PUT."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    email: Annotated[str, Field(pattern=r"^[^@\s]+@[^@\s]+$", max_length=200)]
    name: Annotated[str, Field(min_length=1)]
    country: Annotated[str, Field(pattern="^[A-Z]{2}$")]
    account: Annotated[str, Field(min_length=1, max_length=100)]
    request: Annotated[str, Field(min_length=1)] | None = None
    """The request's id, unless the header Idempotency-Key has it."""


async def create(request: Request) -> Response:
    """Create a tenant, unless there is one with this email."""
    form = await _read_form(request)
    tenant = _make_tenant(derive_id(form.email), form)
    published = await tenants.publish_async(
        tenant.id, tenant, request=_find_id(request, form), check=refuse_known
    )
    return _answer(published, 201, {"Location": f"/tenants/{tenant.id}"})


async def replace(request: Request) -> Response:
    """Give a tenant this state, whether it is there or not."""
    form = await _read_form(request)
    tenant = _make_tenant(request.path_params["id"], form)
    published = await tenants.publish_async(
        tenant.id, tenant, request=_find_id(request, form)
    )
    return _answer(published, 200)


async def delete(request: Request) -> Response:
    """Delete a tenant, whether it is there or not."""
    published = await tenants.publish_async(
        request.path_params["id"], None, request=_find_id(request)
    )
    return _answer(published, 204)


async def show(request: Request) -> Response:
    """Return a tenant as the table has it."""
    rows, headers = await _read("id = %s", request.path_params["id"])
    if not rows:
        raise HTTPException(404, "there is no such tenant", headers)
    return JSONResponse(rows[0], headers=headers)


async def search(request: Request) -> Response:
    """Return the tenants of a country, or all of them."""
    country = request.query_params.get("country")
    chosen = ("country = %s", country) if country else ("true",)
    rows, headers = await _read(*chosen)
    return JSONResponse(rows, headers=headers)


async def _read_form(request: Request) -> Form:
    return Form.model_validate_json(await request.body())


def _find_id(request: Request, form: Form | None = None) -> str | None:
    header = request.headers.get("Idempotency-Key")
    return header or (form.request if form else None)


def _make_tenant(key: str, form: Form) -> Tenant:
    return Tenant(key, form.email, form.name, form.country, form.account)


def _answer(
    published: Published, status: int, headers: dict[str, str] | None = None
) -> Response:
    """Answer with the event: the table may not have it yet."""
    headers = dict(headers or {})
    if published.changed:
        headers[EVENT] = f"{published.partition}/{published.offset}"
    if published.content is None:
        return Response(status_code=status, headers=headers)
    return JSONResponse(published.content, status, headers)


async def _read(
    condition: str, *values: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Read rows, and tell in a header how far the table was before."""
    query = f"select id, email, name, country from tenants_rm where {condition}"
    async with app.transaction() as conn:
        read = (await table.valid_since(conn)).offsets
        async with conn.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(f"{query} order by email".encode(), values)
            rows = await cursor.fetchall()
    told = (f"{number}/{offset}" for number, offset in read.items() if offset)
    return rows, {READ: ", ".join(told)}


def make_web(*, with_processor: bool) -> Starlette:
    """Make the API, with the processor in the same process or without."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service = Service(app) if with_processor else None
        if service is not None:
            await asyncio.to_thread(service.start)
        yield
        if service is not None:
            await asyncio.to_thread(service.stop)
        await app.aclose()
        await asyncio.to_thread(app.close)

    return Starlette(
        routes=[
            Route("/tenants", create, methods=["POST"]),
            Route("/tenants", search),
            Route("/tenants/{id}", replace, methods=["PUT"]),
            Route("/tenants/{id}", delete, methods=["DELETE"]),
            Route("/tenants/{id}", show),
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )


web = make_web(with_processor=False)
whole = make_web(with_processor=True)
