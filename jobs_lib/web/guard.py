"""Refuse what no request of a permitted caller is, before the app below sees it.

It is safe by default, wherever it is mounted: only named hosts are answered, nothing
changes without a caller who is allowed to, and no page of another site can make a
browser of such a caller change anything, or show what it sees in a frame.
"""

from __future__ import annotations

import inspect
import ipaddress
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL = ("localhost", "127.0.0.1", "::1")
"""The hosts that are answered if none are named."""
READS = ("GET", "HEAD")
_NAME = re.compile(r"[a-z0-9._-]+|[0-9a-f:]+")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Stands before an ASGI app.

    Args:
        app: answers what is let in.
        authorise: says whether a request may be answered, plain or async. None: reads
            are answered on this machine alone, and nothing can be changed.
        hosts: the names under which the app is reached, without ports.
        origins: of other sites whose pages may send changes, such as
            ``https://admin.example.org``.

    Raises:
        ConfigurationError: an argument is none of these.
    """

    def __init__(
        self,
        app: ASGIApp,
        authorise: Callable[[Request], bool | Awaitable[bool]] | None,
        hosts: Sequence[str],
        origins: Sequence[str],
    ) -> None:
        if authorise is not None and not callable(authorise):
            raise ConfigurationError(
                f"authorise is {authorise!r}: give a function that takes the request "
                "and says whether it is allowed; or None, for reads on this machine"
            )
        self._app = app
        self._authorise = authorise
        self._hosts = {_check_host(one) for one in _list(hosts, "hosts")}
        self._origins = {_check_origin(one) for one in _list(origins, "origins")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the app below do so."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        request = Request(scope)
        refused = self._refuse_place(request)
        refused = refused or await self._refuse_caller(request)
        if refused is None and request.method not in READS:
            refused = self._refuse_change(request)
        await (refused or self._app)(scope, receive, send_guarded)

    def _refuse_place(self, request: Request) -> JSONResponse | None:
        # A name that an attacker points at this address reaches it from a browser.
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or _find_host(hosts[0]) not in self._hosts:
            return refuse(421, "this host is not served here: see `hosts`")
        return None

    async def _refuse_caller(self, request: Request) -> JSONResponse | None:
        if self._authorise is None:
            if request.method not in READS:
                return refuse(403, "nobody may change anything: see `authorise`")
            if not _is_local(request.scope.get("server")):
                return refuse(403, "only this machine may ask: see `authorise`")
            return None
        if inspect.iscoroutinefunction(self._authorise):
            allowed: Any = await self._authorise(request)
        else:
            allowed = await run_in_threadpool(self._authorise, request)
            if inspect.isawaitable(allowed):
                allowed = await allowed
        # Exactly this: an object that stands for "no" may be true.
        return None if allowed is True else refuse(403, "you are not allowed to")

    def _refuse_change(self, request: Request) -> JSONResponse | None:
        origin = request.headers.get("origin")
        if origin is not None:
            theirs = urlsplit(origin).netloc.lower()
            ours = request.headers["host"].lower()
            if theirs != ours and origin.lower() not in self._origins:
                return refuse(403, "pages of another site may change nothing here")
        elif request.headers.get("sec-fetch-site", "none") not in (
            "same-origin",
            "none",
        ):
            return refuse(403, "pages of another site may change nothing here")
        # A form of another site cannot send this type, and a script there must ask
        # first, and gets no permission.
        type_ = request.headers.get("content-type", "").partition(";")[0].strip()
        if type_.lower() != "application/json":
            return refuse(415, "send the type application/json")
        return None


def refuse(status: int, error: str) -> JSONResponse:
    """Answer with an error, in one line."""
    return JSONResponse({"error": error}, status)


def _list(given: object, what: str) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, list | tuple | set | frozenset):
        raise ConfigurationError(f"the {what} are {given!r}: give a list of texts")
    return [*given]


def _check_host(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name.lower()):
        raise ConfigurationError(
            f"{name!r} names no host: give a name or an address, without a port, such "
            "as admin.example.org. No wildcard is taken"
        )
    return name.lower()


def _check_origin(text: object) -> str:
    parts = urlsplit(text) if isinstance(text, str) else None
    if parts is None or (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or f"{parts.scheme}://{parts.netloc}" != text
    ):
        raise ConfigurationError(
            f"{text!r} is no origin: give one such as https://admin.example.org"
        )
    return str(text).lower()


def _find_host(header: str) -> str:
    """The host of a header, without the port; empty if it is odd."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^:\[\]@/]+))(?::\d+)?", header)
    return "" if found is None else (found[1] or found[2]).lower()


def _is_local(server: Any) -> bool:
    """Whether the connection came in at an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(server[0]).is_loopback
    # Unknown, or a name.
    except (TypeError, ValueError):
        return False
