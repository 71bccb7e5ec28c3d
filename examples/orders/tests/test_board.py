"""The board: the rows that it makes of the shop's records."""

from __future__ import annotations

from board.web import OrderState, to_row
from jobs_lib.testing import make_record


def test_an_order_is_a_row_with_its_customer_and_state() -> None:
    record = make_record(OrderState("ada", "paid"), key="7")
    assert to_row(record) == {"customer": "ada", "state": "paid"}
