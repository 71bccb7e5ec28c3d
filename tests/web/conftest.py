"""Serve an ASGI app over HTTP, on a port that the kernel chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn

from jobs_lib.app import App
from jobs_lib.settings import Settings
from tests.reexport.helpers import make_entity, make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def serving(asgi: Any) -> Iterator[str]:
    """Serve an ASGI app in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(asgi, log_level="critical", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def app(database):
    """An app with an entity, whose table has some keys."""
    app = App("test", settings=Settings(database_url=database.url))
    app.entities["aircraft"] = make_entity()
    make_table(database, range(250), "int")
    return app


@pytest.fixture
def client() -> Iterator[Callable[..., httpx.Client]]:
    """A function that serves an ASGI app, and makes a client of it."""
    with contextlib.ExitStack() as stack:

        def make(asgi: Any, path: str = "") -> httpx.Client:
            url = stack.enter_context(serving(asgi)) + path
            return stack.enter_context(httpx.Client(base_url=url, timeout=60))

        yield make
    # Their database goes next.
    for thread in threading.enumerate():
        if thread.name.startswith("re-export "):
            thread.join()
