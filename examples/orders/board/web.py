"""The board: a read model of the shop's orders, and the consumer in the web server.

``uvicorn board.web:web`` runs both. The board does not read the shop's tables: it knows
only what the topic brings.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Response

from jobs_lib import App, Record, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TABLE = """
    create table if not exists board (
        id text primary key, version bigint, customer text, state text
    )
"""
app = App("board")


@dataclass
class OrderState:
    """The part of the shop's state that the board shows; it ignores the rest."""

    customer: str
    state: str


@app.read_model("order-state", table="board", key="id", group="board", value=OrderState)
def to_row(record: Record[OrderState]) -> dict[str, Any]:
    """The row of an order; the library adds key and version."""
    return {"customer": record.value.customer, "state": record.value.state}


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    """Run the consumer while the web server runs."""
    with app.transaction() as conn:
        conn.execute(TABLE)
    service = web.state.service = Service(app)
    # The start may wait for servers, so it runs in a thread: the event loop must not
    # wait.
    await asyncio.to_thread(service.start)
    try:
        yield
    finally:
        await asyncio.to_thread(service.stop)
        app.close()


web = FastAPI(title="board", lifespan=lifespan)


@web.get("/readyz")
def ready() -> Response:
    """Whether the consumer runs."""
    service: Service = web.state.service
    return Response(status_code=200 if service.is_ready else 503)


@web.get("/board/{order}")
def show(order: str) -> dict[str, str]:
    """The state of an order."""
    with app.transaction() as conn:
        row = conn.execute(
            "select customer, state from board where id = %s", (order,)
        ).fetchone()
    if row is None:
        raise HTTPException(404, f"the board has no order {order}")
    return {"customer": row[0], "state": row[1]}
