"""The shop: over HTTP, with its real tables and jobs, and the flaky partner."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from http.server import ThreadingHTTPServer
from itertools import count
from typing import TYPE_CHECKING

import httpx
import pytest
from fastapi.testclient import TestClient

import partner
from shop import jobs as shop
from shop.app import OrderState, order_state
from shop.web import web

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from jobs_lib.testing import Jobs, Outbox


@pytest.fixture
def client(jobs: Jobs) -> Iterator[TestClient]:
    """The shop's web server, on the test's database."""
    with TestClient(web) as opened:
        yield opened


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The partner, at a port of its own; its first answer is a refusal."""
    for path, done in partner.done.items():
        done.clear()
        partner.calls[path] = 0
    monkeypatch.setattr(partner, "turns", count())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partner.Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
        monkeypatch.setattr(shop, "partner", client)
        yield partner
    server.shutdown()
    thread.join()
    server.server_close()


def place(client: TestClient, cents: int = 1_200) -> int:
    """Place an order for ada; return its id."""
    reply = client.post("/orders", json={"customer": "ada", "cents": cents})
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def test_an_order_is_a_row_a_job_and_a_state(
    client: TestClient, jobs: Jobs, outbox: Outbox
) -> None:
    order = place(client)
    assert client.get(f"/orders/{order}").json()["state"] == "placed"
    assert jobs.assert_enqueued(shop.charge, order=order, cents=1_200).group == "ada"
    outbox.assert_sent(
        order_state,
        key=str(order),
        value=OrderState(order, "ada", 1_200, "placed", version=1),
    )


def test_a_refused_order_leaves_nothing(
    client: TestClient, jobs: Jobs, outbox: Outbox
) -> None:
    reply = client.post("/orders", json={"customer": "ada", "cents": -1})
    assert reply.status_code == 422
    assert (jobs.enqueued(), outbox.sent()) == ([], [])


def test_each_order_is_charged_once_however_often_the_partner_is_asked(
    client: TestClient, jobs: Jobs, outbox: Outbox, flaky: ModuleType
) -> None:
    orders = [place(client, cents) for cents in (1_200, 300, 50)]
    jobs.drain(until=datetime.now(UTC) + timedelta(minutes=10), raises=False)
    assert len(jobs.errors) == flaky.calls["/charges"] + flaky.calls["/texts"] - 6
    charged = flaky.done["/charges"].values()
    assert [charge["order"] for charge in charged] == orders
    for order in orders:
        assert client.get(f"/orders/{order}").json()["state"] == "paid"
    with jobs.transaction() as conn:
        assert conn.execute("select * from totals").fetchall() == [("ada", 1_550)]
        assert conn.execute("select count(*) from parcels").fetchone() == (3,)


def test_a_refund_follows_the_charge_even_if_it_is_asked_for_before(
    client: TestClient, jobs: Jobs, flaky: ModuleType
) -> None:
    order = place(client)
    for _ in range(2):
        assert client.post(f"/orders/{order}/refund").status_code == 202
    assert len(jobs.enqueued(shop.refund)) == 1
    jobs.drain(until=datetime.now(UTC) + timedelta(minutes=10), raises=False)
    assert [*map(len, (flaky.done["/charges"], flaky.done["/refunds"]))] == [1, 1]
    assert client.get(f"/orders/{order}").json()["state"] == "refunded"
    # Asked for once more, the money is not given back again.
    assert client.post(f"/orders/{order}/refund").status_code == 202
    jobs.drain()
    assert len(flaky.done["/refunds"]) == 1
    with jobs.transaction() as conn:
        assert conn.execute("select cents from totals").fetchone() == (0,)


def test_an_old_order_is_deleted_and_its_tombstone_sent(
    client: TestClient, jobs: Jobs, outbox: Outbox
) -> None:
    order = place(client)
    in_two_years = datetime.now(UTC) + timedelta(days=730)
    with jobs.transaction() as conn, jobs.inline():
        shop.forget.enqueue(conn, tick=in_two_years)
    outbox.assert_sent(order_state, key=str(order), value=None)
    assert client.get(f"/orders/{order}").status_code == 404
