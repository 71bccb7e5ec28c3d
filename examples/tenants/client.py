"""A client of the API that repeats what fails, and reads what it has written.

The table behind the API is a little behind the topic. So the client keeps what each of
its changes was answered with, and merges that with what it reads, until the table has
it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

EVENT, READ = "Tenant-Event", "Tenants-Read"
_AWAY = 503
_PAUSE = 0.2
"""Seconds until a request is repeated, if no answer says how many."""

Content = dict[str, Any]


@dataclass(slots=True)
class _Change:
    """A change that the table may not have yet."""

    partition: int
    offset: int
    content: Content | None
    last: int | None = None
    """The last read that had begun when an answer had it; None if no answer had it."""


class TenantsClient:
    """Calls the API; threads may share it.

    Args:
        address: of the API.
        patience: seconds for which a request is repeated.
        timeout: seconds for which an answer is waited for.
        transport: sends the requests; by default httpx's own.
    """

    def __init__(
        self,
        address: str,
        *,
        patience: float = 60.0,
        timeout: float = 15.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=address, timeout=timeout, transport=transport
        )
        self._patience = patience
        self._lock = Lock()
        self._changes: dict[str, _Change] = {}
        self._begun = 0
        """How many reads have begun: their numbers."""
        self._under_way: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def create(self, tenant: Content, request: str | None = None) -> Content:
        """Create a tenant; returns it with its id.

        Args:
            tenant: email, name, country and account.
            request: the id of the request; by default a new one.

        Raises:
            HTTPStatusError: the API refuses it, or is away for too long.
        """
        answer = self._send("POST", "/tenants", json=tenant, request=request)
        content: Content = answer.json()
        self._keep(content["id"], answer, content)
        return content

    def put(self, id_: str, tenant: Content, request: str | None = None) -> Content:
        """Give a tenant this state.

        Raises:
            HTTPStatusError: the API refuses it, or is away for too long.
        """
        answer = self._send("PUT", f"/tenants/{id_}", json=tenant, request=request)
        content: Content = answer.json()
        self._keep(id_, answer, content)
        return content

    def delete(self, id_: str, request: str | None = None) -> None:
        """Delete a tenant.

        Raises:
            HTTPStatusError: the API is away for too long.
        """
        answer = self._send("DELETE", f"/tenants/{id_}", request=request)
        self._keep(id_, answer, None)

    def find(self, id_: str) -> Content | None:
        """Find a tenant; None if there is none."""
        with self._reading():
            answer = self._send("GET", f"/tenants/{id_}", allowed={404})
            rows = [] if answer.status_code == 404 else [answer.json()]
            merged = self._merge(answer, rows, lambda one: one["id"] == id_)
        return merged[0] if merged else None

    def search(self, country: str) -> list[Content]:
        """List the tenants of a country, by their email."""
        with self._reading():
            answer = self._send("GET", "/tenants", params={"country": country})
            merged = self._merge(
                answer, answer.json(), lambda one: one["country"] == country
            )
        return sorted(merged, key=lambda one: str(one["email"]))

    def _send(
        self,
        method: str,
        path: str,
        *,
        request: str | None = None,
        allowed: Collection[int] = (),
        **what: Any,
    ) -> httpx.Response:
        """Send a request, and repeat it with the same id while its fate is unknown."""
        headers = {"Idempotency-Key": request or str(uuid4())}
        until = time.monotonic() + self._patience
        while True:
            pause = _PAUSE
            try:
                answer = self._http.request(method, path, headers=headers, **what)
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
            else:
                if answer.status_code in allowed:
                    return answer
                if answer.status_code != _AWAY or time.monotonic() > until:
                    return answer.raise_for_status()
                pause = float(answer.headers.get("Retry-After", _PAUSE))
            time.sleep(pause)

    def _keep(self, id_: str, answer: httpx.Response, content: Content | None) -> None:
        """Keep a change, unless a later one is kept."""
        if EVENT not in answer.headers:
            return  # the table has it
        partition, offset = map(int, answer.headers[EVENT].split("/"))
        change = _Change(partition, offset, content)
        with self._lock:
            known = self._changes.get(id_)
            if known is None or known.offset < offset or known.partition != partition:
                self._changes[id_] = change

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """At the end, forget the changes that no read under way can lack.

        A slow answer may be older than one that came before it.
        """
        with self._lock:
            self._begun += 1
            number = self._begun
            self._under_way.add(number)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove(number)
                oldest = min(self._under_way, default=self._begun + 1)
                self._changes = {
                    id_: change
                    for id_, change in self._changes.items()
                    if change.last is None or change.last >= oldest
                }

    def _merge(
        self,
        answer: httpx.Response,
        rows: list[Content],
        belongs: Callable[[Content], bool],
    ) -> list[Content]:
        """Put the changes that the table did not have in the place of its rows."""
        read = _read_places(answer.headers.get(READ, ""))
        with self._lock:
            changes = dict(self._changes)
            for id_, change in self._changes.items():
                if change.offset < read.get(change.partition, 0):
                    del changes[id_]
                    change.last = change.last or self._begun
        kept = [row for row in rows if row["id"] not in changes]
        contents = (change.content for change in changes.values())
        return kept + [one for one in contents if one is not None and belongs(one)]


def _read_places(text: str) -> dict[int, int]:
    """Read the offsets up to which the table has each partition."""
    places = (part.split("/") for part in text.split(",") if part.strip())
    return {int(partition): int(offset) for partition, offset in places}
