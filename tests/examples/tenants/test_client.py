"""The client reads what it has written, while the table is behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from examples.tenants.client import EVENT, READ, TenantsClient
from tests.support.tenants import Stage, make_form, without_account


@pytest.fixture(scope="module")
def stage(make_stage) -> Stage:
    """The API alone: no processor keeps the table yet."""
    made = make_stage()
    made.start_api()
    return made


@pytest.fixture
def client(stage):
    with TenantsClient(stage.address) as opened:
        yield opened


@pytest.fixture
def other(stage):
    with TenantsClient(stage.address) as opened:
        yield opened


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("W74", "T12")
def test_a_client_sees_its_changes_at_once_and_those_of_others_when_the_table_has_them(
    stage, client, other
):
    ada = client.create(make_form("ada"))
    bob = client.create(make_form("bob"))
    eve = client.create(make_form("eve"))
    client.put(bob["id"], make_form("bob", country="FR"))
    client.delete(eve["id"])
    french = without_account({"id": bob["id"], **make_form("bob", country="FR")})
    assert client.search("DE") == [ada]
    assert client.search("FR") == [french]
    found = [client.find(one["id"]) for one in (ada, bob, eve)]
    assert found == [ada, french, None]
    # The table has nothing of it.
    assert stage.read_table() == {}
    assert (other.search("DE"), other.find(ada["id"])) == ([], None)

    stage.start_processor()
    stage.await_table()
    assert (other.search("DE"), other.search("FR")) == ([ada], [french])
    moved = other.put(ada["id"], make_form("ada", country="FR"))
    other.delete(bob["id"])
    stage.await_table()
    # What the client has kept does not hide newer states.
    assert (client.search("DE"), client.search("FR")) == ([], [moved])
    assert client.find(bob["id"]) is None


@pytest.mark.guarantee("W74")
def test_a_client_raises_what_the_api_refuses(client):
    with pytest.raises(httpx.HTTPStatusError, match="422"):
        client.create(make_form("nobody", country="XX"))
    assert client.search("XX") == []


@pytest.mark.guarantee("W74")
def test_a_slow_answer_shows_a_change_that_a_later_one_has_had_before():
    ada = {"id": "t1", **make_form("ada")}
    begun, go_on = threading.Event(), threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(201, json=ada, headers={EVENT: "0/5"})
        if not begun.is_set():
            begun.set()
            assert go_on.wait(60)
            return httpx.Response(200, json=[], headers={READ: "0/5"})
        return httpx.Response(200, json=[ada], headers={READ: "0/6"})

    transport = httpx.MockTransport(answer)
    with TenantsClient("http://api", transport=transport) as client:
        client.create(make_form("ada"))
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(client.search, "DE")
            assert begun.wait(60)
            assert client.search("DE") == [ada]
            go_on.set()
            assert slow.result(60) == [ada]
        # It keeps no change for good.
        assert client._changes == {}
