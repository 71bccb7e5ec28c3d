"""The app, on which the other modules declare their parts. Nothing connects here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg.rows import class_row

from jobs_lib import App

if TYPE_CHECKING:
    from psycopg import Connection

app = App("shop")


@dataclass
class OrderState:
    """An order, as in the topic ``order-state``."""

    id: int
    customer: str
    cents: int
    state: str
    version: int


order_state = app.topic("order-state", value=OrderState, compacted=True)


@app.entity(order_state, source="orders", key="id")
def load_orders(conn: Connection[Any], keys: list[str]) -> dict[str, OrderState]:
    """The current states of orders: the relay reads them when it sends."""
    query = "select id, customer, cents, state, version from orders where id = any (%s)"
    with conn.cursor(row_factory=class_row(OrderState)) as cursor:
        cursor.execute(query, ([int(key) for key in keys],))
        return {str(order.id): order for order in cursor}
