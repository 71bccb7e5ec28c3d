"""Nobody but a permitted caller steers a re-export over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from jobs_lib.errors import ConfigurationError
from jobs_lib.web import reexports
from tests.reexport.helpers import query

START = {"rate": 6_000}
PATHS = ("start", "plan", "pause", "resume", "cancel", "rate", "watch-lag")


def allow(request) -> bool:
    return bool(request.headers.get("authorization") == "Bearer me")


@pytest.fixture
def web(app, client):
    """A client of the app, who may do everything."""
    found = client(
        reexports(
            app,
            authorise=allow,
            hosts=["127.0.0.1", "admin.example.org", "::1"],
            origins=["https://tools.example.org"],
        )
    )
    found.headers["authorization"] = "Bearer me"
    return found


def count(database) -> int:
    return int(query(database, "select count(*) from jobs_lib.reexports")[0][0])


@pytest.mark.guarantee("FS4")
def test_a_caller_who_is_not_allowed_sees_and_changes_nothing(web, database):
    for given in (None, "Bearer you"):
        web.headers.pop("authorization", None)
        if given is not None:
            web.headers["authorization"] = given
        answers = [web.get("/"), web.get("/aircraft"), web.get("/nothing")]
        answers += [web.post(f"/aircraft/{one}", json=START) for one in PATHS]
        assert {one.status_code for one in answers} == {403}
        assert {one.json()["error"] for one in answers} == {"you are not allowed to"}
    assert count(database) == 0


@pytest.mark.guarantee("FS4")
@pytest.mark.parametrize("server", ["127.0.0.1", "::1", "10.1.2.3", "2001:db8::1"])
def test_without_an_authoriser_this_machine_alone_may_read(app, database, server):
    name = f"[{server}]" if ":" in server else server
    asgi = reexports(app, authorise=None, hosts=[server])

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://{name}"
        ) as web:
            return [
                await web.get("/"),
                await web.post("/aircraft/start", json=START),
            ]

    read, change = asyncio.run(ask())
    assert read.status_code == (200 if server in ("127.0.0.1", "::1") else 403)
    assert change.status_code == 403
    assert count(database) == 0


@pytest.mark.guarantee("FS5")
def test_reading_changes_nothing(web, database):
    for path in PATHS:
        for method in ("GET", "HEAD", "OPTIONS"):
            answer = web.request(method, f"/aircraft/{path}?rate=60")
            assert answer.status_code in (404, 405, 415)
    assert count(database) == 0


@pytest.mark.guarantee("FS5")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example.org"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "http://tools.example.org"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"origin": "https://tools.example.org"}, 201),
        ({"sec-fetch-site": "same-origin"}, 201),
        ({"content-type": "Application/JSON; charset=utf-8"}, 201),
    ],
)
def test_no_page_of_another_site_changes_anything(web, database, headers, status):
    sent = {"content-type": "application/json"} | headers
    answer = web.post("/aircraft/start", content='{"rate": 6000}', headers=sent)
    assert answer.status_code == status
    assert count(database) == (status == 201)


def test_a_page_of_the_host_itself_may_send_changes(web, database):
    host = web.base_url.netloc.decode()
    origin = {"origin": f"http://{host}"}
    assert web.post("/aircraft/start", json=START, headers=origin).status_code == 201


@pytest.mark.guarantee("FS7")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example.org", 421),
        ("evil.example.org:80", 421),
        ("127.0.0.1.evil.example.org", 421),
        ("127.0.0.1@evil.example.org", 421),
        ("", 421),
        ("localhost", 421),
        ("ADMIN.example.org:8443", 200),
        ("[::1]:80", 200),
    ],
)
def test_only_named_hosts_are_answered(web, host, status):
    assert web.get("/", headers={"host": host}).status_code == status


@pytest.mark.guarantee("FS7")
def test_no_answer_is_framed_kept_shared_or_a_redirect(web):
    for path in ("/", "/aircraft", "/aircraft/", "//evil.example.org", "/x/start"):
        answer = web.get(path)
        assert not answer.is_redirect
        headers = answer.headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not [one for one in headers if one.startswith("access-control")]
    refused = web.get("/", headers={"host": "x"})
    assert "frame-ancestors 'none'" in refused.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b"[" * 10_000, 400),
        (b" " * 16_385, 413),
        (b'{"rate": 6000}' + b" " * 10_000, 201),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_are_bounded_objects(web, database, body, status, chunked):
    content = iter([body[:5], body[5:]]) if chunked else body
    sent = {"content-type": "application/json"}
    answer = web.post("/aircraft/start", content=content, headers=sent)
    assert answer.status_code == status
    assert count(database) == (status == 201)


@pytest.mark.parametrize("kind", ["async", "callable", "truthy", "none", "failing"])
def test_an_authoriser_may_be_of_any_kind_and_only_true_lets_in(
    app, client, database, kind
):
    async def ask(request):
        return True

    def fail(request):
        raise RuntimeError("not now")

    class Callable:
        async def __call__(self, request):
            return True

    kinds: dict[str, Any] = {
        "async": ask,
        "callable": Callable(),
        "truthy": lambda request: "no",
        "none": lambda request: None,
        "failing": fail,
    }
    answer = client(reexports(app, authorise=kinds[kind])).post(
        "/aircraft/start", json=START
    )
    expected = {"async": 201, "callable": 201, "failing": 500}.get(kind, 403)
    assert answer.status_code == expected
    assert count(database) == (expected == 201)


def ask(asgi: Any, headers: list[tuple[bytes, bytes]], receive: Any) -> int:
    """Send a request as no server would; returns the status."""
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/aircraft/start",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"authorization", b"Bearer me"),
            (b"content-type", b"application/json"),
            *headers,
        ],
    }
    asyncio.run(asgi(scope, receive, send))
    return int(sent[0]["status"])


def test_a_body_without_an_end_is_refused_once_it_is_too_large(app):
    read = []

    async def receive():
        read.append(b" " * 10_000)
        assert len(read) < 9
        return {"type": "http.request", "body": read[-1], "more_body": True}

    asgi = reexports(app, authorise=allow, hosts=["127.0.0.1"])
    assert ask(asgi, [], receive) == 413
    assert len(read) == 2


@pytest.mark.guarantee("FS5")
def test_a_request_that_names_two_hosts_is_refused(app):
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    asgi = reexports(app, authorise=allow, hosts=["127.0.0.1"])
    assert ask(asgi, [], receive) == 422
    assert ask(asgi, [(b"host", b"evil.example.org")], receive) == 421


def test_a_socket_is_refused(app):
    asgi: Any = reexports(app, authorise=allow)
    sent = []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(asgi({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == ["websocket.close"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"authorise": "me"}, "authorise is 'me'"),
        ({"hosts": "admin"}, "the hosts are 'admin'"),
        ({"hosts": ["*"]}, r"'\*' names no host"),
        ({"hosts": ["admin:80"]}, "names no host"),
        ({"hosts": [1]}, "names no host"),
        ({"origins": ["admin.example.org"]}, "is no origin"),
        ({"origins": ["https://admin.example.org/"]}, "is no origin"),
        ({"origins": ["*"]}, "is no origin"),
    ],
)
def test_arguments_that_say_nothing_are_refused(app, given, told):
    with pytest.raises(ConfigurationError, match=told):
        reexports(app, **({"authorise": allow} | given))
    with pytest.raises(TypeError, match="authorise"):
        reexports(app)  # type: ignore[call-arg]
