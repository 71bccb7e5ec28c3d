"""Re-exports over HTTP: an ASGI app to mount.

    GET  /                      the latest re-exports of all entities
    GET  /ENTITY                how far it is
    POST /ENTITY/plan           ranges, rate, end, readers; changes nothing
    POST /ENTITY/start          begin it, or continue it
    POST /ENTITY/rate           and /pause, /resume, /cancel, /watch-lag

The app only reads and checks requests; the same functions as behind the commands do the
work, in threads, since they wait for the database.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jobs_lib import reexport as api
from jobs_lib.errors import JobsError, ReexportError, UnavailableError
from jobs_lib.masking import describe, spell
from jobs_lib.operating.reexports import (
    choose_rate,
    find_limit,
    find_open_topic,
    look_ahead,
)
from jobs_lib.reexport.control import check_rate
from jobs_lib.reexport.run import CHUNK
from jobs_lib.web.guard import LOCAL, Guard, refuse
from jobs_lib.web.loaders import Loaders

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Entity

    Answer = tuple[int, dict[str, Any]]

R = TypeVar("R")
_BODY = 16_384
"""Bytes that a request's body may have."""
_PACE = {"rate": int, "window": str, "tz": str, "ranges": int}
_FIELDS: dict[str, dict[str, type]] = {
    "plan": _PACE,
    "start": {**_PACE, "chunk": int, "watch_lag": str},
    "rate": {"rate": int},
    "watch-lag": {"limit": str},
    "pause": {},
    "resume": {},
    "cancel": {},
}


def reexports(
    app: App,
    *,
    authorise: Callable[[Request], bool | Awaitable[bool]] | None,
    hosts: Sequence[str] = LOCAL,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Make an ASGI app that shows and steers the re-exports of an app's entities.

    Args:
        app: declares the entities.
        authorise: gets each request, and says whether it may be answered; it may be
            async. None: nothing can be changed, and only this machine may ask.
        hosts: the names under which it is reached, without ports. Defaults to those
            of this machine.
        origins: other sites whose pages may send changes. Defaults to none.

    Raises:
        ConfigurationError: an argument is none of these.
    """
    return Guard(_make_routes(_Control(app)), authorise, hosts, origins)


class _Control:
    """What requests do, in a thread each."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._loaders = Loaders()

    def list_all(self) -> Answer:
        """List the latest re-exports."""
        found = api.list_latest(self._app.database())
        return 200, {"reexports": [_show(one) for one in found]}

    def show(self, name: str) -> Answer:
        """Show one, with its loader if this process has it."""
        entity = self._find(name)
        try:
            progress = api.status(self._app.database(), entity.name)
        except ReexportError as error:  # there was never one
            raise HTTPException(404, str(error)) from None
        return 200, self._tell(progress)

    def plan(self, name: str, given: Mapping[str, Any]) -> Answer:
        """Plan one, and change nothing."""
        entity, rate = self._find(name), _choose(given)
        found = look_ahead(self._app, entity, rate, given.get("ranges"))
        return 200, found.as_dict()

    def start(self, name: str, given: Mapping[str, Any]) -> Answer:
        """Begin one or continue it, and load it in a thread."""
        entity, rate, limit = self._find(name), _choose(given), None
        if "watch_lag" in given:
            limit = self._find_limit(entity.topic.name, given["watch_lag"])
        database = self._app.database()
        begun = api.begin(
            database,
            entity,
            rate=rate,
            ranges=given.get("ranges"),
            chunk=given.get("chunk", CHUNK),
            watch_lag=limit,
        )
        self._loaders.load(database, begun)
        progress = api.status(database, entity.name)
        return 200 if begun.resumed else 201, self._tell(progress)

    def change(self, what: str, name: str, given: Mapping[str, Any]) -> Answer:
        """Pause, resume or cancel one, change its rate, or the lag it watches."""
        entity, database = self._find(name), self._app.database()
        if what == "rate":
            if "rate" not in given:
                raise HTTPException(422, "the field rate is missing")
            rate = _judge(lambda: check_rate(given["rate"]))
            return 200, self._tell(api.set_rate(database, entity.name, rate))
        if what == "watch-lag":
            text = given.get("limit")
            limit = None
            if text is not None:
                limit = self._find_limit(find_open_topic(self._app, entity), text)
            return 200, self._tell(api.watch_lag(database, entity.name, limit))
        act = {"pause": api.pause, "resume": api.resume, "cancel": api.cancel}[what]
        return 200, self._tell(act(database, entity.name))

    def _find_limit(self, topic: str, text: str) -> api.LagLimit:
        return _judge(lambda: find_limit(self._app, topic, text))

    def _tell(self, progress: api.Progress) -> dict[str, Any]:
        return _show(progress) | {"loader": self._loaders.find(progress.id)}

    def _find(self, name: str) -> Entity:
        found = self._app.entities.get(name)
        if found is None:
            raise HTTPException(404, "the app declares no such entity")
        return found


def _make_routes(control: _Control) -> Starlette:
    async def list_all(request: Request) -> Response:
        return await _answer(control.list_all)

    async def show(request: Request) -> Response:
        return await _answer(partial(control.show, request.path_params["entity"]))

    def post(what: str) -> Callable[[Request], Awaitable[Response]]:
        acts = {"plan": control.plan, "start": control.start}
        act = acts.get(what, partial(control.change, what))

        async def change(request: Request) -> Response:
            given = await _read(request, _FIELDS[what])
            return await _answer(partial(act, request.path_params["entity"], given))

        return change

    found = Starlette(
        routes=[
            Route("/", list_all, methods=["GET"]),
            *(
                Route(f"/{{entity:path}}/{what}", post(what), methods=["POST"])
                for what in _FIELDS
            ),
            Route("/{entity:path}", show, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _refuse_http},
    )
    # A redirect would repeat what the request says of its host.
    found.router.redirect_slashes = False
    return found


async def _answer(act: Callable[[], Answer]) -> Response:
    """Run it in a thread; an error that says the way out becomes an answer."""
    try:
        status, shown = await run_in_threadpool(act)
    except (UnavailableError, psycopg.OperationalError) as error:
        return refuse(503, describe(error))
    except JobsError as error:
        return refuse(409, spell(error))
    return JSONResponse(shown, status)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = refuse(error.status_code, error.detail)
    found.headers.update(error.headers or {})
    return found


async def _read(request: Request, fields: Mapping[str, type]) -> dict[str, Any]:
    """Read the body: an object that has some of these fields and no other."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY:
            raise HTTPException(413, f"a request has at most {_BODY:,} bytes")
    try:
        given = json.loads(body or b"{}")
    # Deep brackets, too.
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise HTTPException(400, "the body is no object of JSON")
    if unknown := given.keys() - fields.keys():
        known = ", ".join(fields) or "none"
        raise HTTPException(
            422, f"{len(unknown)} fields of the body are unknown; known are: {known}"
        )
    for name, type_ in fields.items():
        # A bool is an int.
        if given.get(name) is not None and type(given[name]) is not type_:
            spelled = "a whole number" if type_ is int else "a text"
            raise HTTPException(422, f"{name} is {spelled}")
    return {name: value for name, value in given.items() if value is not None}


def _choose(given: Mapping[str, Any]) -> int | api.Window:
    return _judge(
        lambda: choose_rate(given.get("rate"), given.get("window"), given.get("tz"))
    )


def _judge(check: Callable[[], R]) -> R:
    """Check a value of the body: its faults are the sender's."""
    try:
        return check()
    except ReexportError as error:
        raise HTTPException(422, spell(error)) from None


def _show(progress: api.Progress) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in dataclasses.asdict(progress).items()
    }
