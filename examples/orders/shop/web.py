"""The shop's HTTP interface. ``uvicorn shop.web:web`` serves it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from shop.app import order_state
from shop.database import Order, async_sessions, connected, sessions
from shop.jobs import app, charge, refund

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncSession


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Keep the engines open while the server runs."""
    async with connected():
        yield
    app.close()


web = FastAPI(title="shop", lifespan=lifespan)


class NewOrder(BaseModel):
    """The order that a customer sends."""

    customer: Annotated[str, Field(min_length=1, max_length=100)]
    cents: Annotated[int, Field(gt=0, le=1_000_000_00)]


class Placed(BaseModel):
    """The answer to a customer."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    customer: str
    cents: int
    state: str


@web.post("/orders", status_code=201)
def place(new: NewOrder) -> Placed:
    """Take an order: its row, its job and its state are one transaction."""
    # The block commits before the answer is sent.
    with sessions.begin() as session:
        order = Order(customer=new.customer, cents=new.cents)
        session.add(order)
        session.flush()  # the row is written, and has its id
        charge.enqueue(
            session, customer=order.customer, order=order.id, cents=order.cents
        )
        order_state.send_current(session, key=str(order.id))
        return Placed.model_validate(order)


@web.post("/orders/{order_id}/refund", status_code=202)
async def ask_refund(order_id: int) -> Placed:
    """Ask for the money back, with an asynchronous session."""
    async with async_sessions.begin() as session:
        order = await find(session, order_id)
        # A second request is the same job as the first, while that one waits.
        once = refund.options(unique=f"refund-{order_id}")
        await once.enqueue(
            session, customer=order.customer, order=order.id, cents=order.cents
        )
        return Placed.model_validate(order)


@web.get("/orders/{order_id}")
async def show(order_id: int) -> Placed:
    """Return an order as it is now."""
    async with async_sessions() as session:
        return Placed.model_validate(await find(session, order_id))


async def find(session: AsyncSession, order_id: int) -> Order:
    """Find the order, or answer 404."""
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, f"there is no order {order_id}")
    return order
