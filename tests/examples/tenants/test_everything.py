"""Ten thousand requests, while each part of the example is killed by turns."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from examples.tenants.client import TenantsClient
from examples.tenants.tenants import derive_id
from jobs_lib.testing.databases import Databases, embedded_server
from tests.support.brokers import start_own_broker
from tests.support.tenants import Stage, make_form, make_tables, read_place, read_states
from tests.support.topics import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.devstack import PostgresServer
    from tests.support.brokers import OwnBroker

REQUESTS = 10_000
CALLERS = 16
EACH = 400
"""After so many answers the next part is killed."""
CHANGED, DELETED = 10, 25
"""Each tenant with such a number is changed, or deleted."""


@dataclass
class Answers:
    """What was answered with success, by the id of the request."""

    of: defaultdict[str, Counter[tuple[Any, ...]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    count: int = 0
    others: Counter[int] = field(default_factory=Counter)

    def note(self, request: httpx.Request, answer: httpx.Response) -> None:
        """Note an answer."""
        if not answer.is_success:
            self.others[answer.status_code] += 1
            return
        place = read_place(answer)
        told = answer.status_code, *place, answer.content
        self.of[request.headers["Idempotency-Key"]][told] += 1
        self.count += 1


class Noting(httpx.HTTPTransport):
    """Notes each answer that has come."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(limits=httpx.Limits(max_keepalive_connections=10))
        self._answers = answers

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        answer = super().handle_request(request)
        answer.read()
        self._answers.note(request, answer)
        return answer


@dataclass
class Tenant:
    """One tenant of the run: its requests, in their order."""

    number: int

    @property
    def name(self) -> str:
        return f"t{self.number}"

    @property
    def key(self) -> str:
        return derive_id(f"{self.name}@example.org")

    def call(self, client: TenantsClient) -> int:
        """Send the requests; a tenth of them five times at once."""
        calls: list[Callable[[], object]] = [
            lambda: client.create(make_form(self.name), f"create-{self.name}")
        ]
        if self.number % CHANGED == 0:
            form = make_form(self.name, country="FR")
            calls.append(lambda: client.put(self.key, form, f"put-{self.name}"))
        if self.number % DELETED == 0:
            calls.append(lambda: client.delete(self.key, f"delete-{self.name}"))
        for number, call in enumerate(calls):
            if (self.number + number) % 10:
                call()
                continue
            with ThreadPoolExecutor(5) as pool:
                for result in [pool.submit(call) for _ in range(5)]:
                    result.result()
        return len(calls)

    @property
    def state(self) -> dict[str, Any] | None:
        """What the tenant is at the end."""
        if self.number % DELETED == 0:
            return None
        country = "FR" if self.number % CHANGED == 0 else "DE"
        return {"id": self.key, **make_form(self.name, country=country)}


def choose_tenants() -> list[Tenant]:
    """So many tenants that their requests are ten thousand."""
    tenants: list[Tenant] = []
    requests = 0
    while requests < REQUESTS:
        number = len(tenants) + 1
        tenants.append(Tenant(number))
        requests += 1 + (number % CHANGED == 0) + (number % DELETED == 0)
    assert requests == REQUESTS
    return tenants


class Killer:
    """Kills the parts by turns, and starts them again."""

    def __init__(self, stage: Stage, broker: OwnBroker, postgres: PostgresServer):
        self._stage = stage
        self._broker = broker
        self._postgres = postgres
        self._workers = {
            "api": stage.start_api(),
            "processor": stage.start_processor(),
            "provider": stage.start_provider(),
        }
        self.killed: Counter[str] = Counter()

    def kill(self, part: str) -> None:
        """Kill one part, and start it again."""
        if part == "broker":
            with self._broker.down():
                pass
        elif part == "database":
            self._postgres.kill()
            self._postgres.start()
        else:
            self._workers[part].kill()
            start = getattr(self._stage, f"start_{part}")
            self._workers[part] = start()
        self.killed[part] += 1

    def run(self, answers: Answers, is_over: threading.Event) -> None:
        """Kill the next part after each few hundred answers."""
        parts = cycle(["api", "processor", "provider", "broker", "database"])
        last = 0
        while not is_over.wait(0.05):
            if answers.count >= last + EACH:
                last = answers.count
                self.kill(next(parts))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.expects("loop.failed", "jobs.fenced", "origins.lost", "fenced")
@pytest.mark.guarantee("T5", "T14", "T16", "T3")
def test_ten_thousand_requests_while_all_parts_are_killed_make_one_event_each(tmp_path):
    with (
        embedded_server() as postgres,
        Databases(postgres.url) as databases,
        databases.fresh(make_tables) as url,
        start_own_broker() as broker,
    ):
        create_topic(broker.admin, "tenants", 6, {"cleanup.policy": "compact"})
        servers = broker.bootstrap_servers
        stage = Stage(url, servers, servers, tmp_path, workers=16, publish_timeout=3.0)
        try:
            check(stage, Killer(stage, broker, postgres))
        except httpx.HTTPStatusError as error:
            pytest.fail(f"{error}: {error.response.text}\n{stage.output}")
        finally:
            stage.close()


def check(stage: Stage, killer: Killer) -> None:
    """Send all requests while the parts are killed, and look at what is left."""
    answers, is_over = Answers(), threading.Event()
    tenants = choose_tenants()
    begun = time.monotonic()
    with (
        ThreadPoolExecutor(CALLERS + 1) as pool,
        TenantsClient(
            stage.address, patience=300, timeout=30, transport=Noting(answers)
        ) as client,
    ):
        killing = pool.submit(killer.run, answers, is_over)
        try:
            sent = sum(pool.map(lambda tenant: tenant.call(client), tenants))
        finally:
            is_over.set()
            killing.result()
        seconds = time.monotonic() - begun
        # Whoever asks again later gets the same answers.
        for tenant in tenants[::100]:
            tenant.call(client)
    stage.await_table(timeout=120)
    stage.await_registrations(timeout=300)
    print(
        f"{sent} requests, {answers.count} answers, {dict(answers.others)} others in "
        f"{seconds:.0f} s ({sent / seconds:.0f}/s); killed: {dict(killer.killed)}"
    )
    assert sent == REQUESTS
    assert min(killer.killed[part] for part in ("api", "broker", "database")) >= 3

    log = stage.read_log()
    requests = Counter(event.headers["ce_request"] for event in log)
    assert [one for one, count in requests.items() if count > 1] == []
    assert requests.keys() == answers.of.keys()
    assert len(log) == REQUESTS
    events = {event.headers["ce_request"]: event for event in log}
    for request, told in answers.of.items():
        ((_, partition, offset, content),) = told  # one answer, however often
        event = events[request]
        assert (event.partition, event.offset) == (partition, offset)
        shown = None if event.json is None else {**event.json}
        if shown is not None:
            del shown["account"]
        assert (httpx.Response(200, content=content).json() if content else None) == (
            shown
        )

    expected = {one.key: one.state for one in tenants if one.state is not None}
    assert stage.read_table() == read_states(log) == expected
    registered = Counter(stage.read_registrations())
    assert [one for one, count in registered.items() if count > 1] == []
    assert expected.keys() <= registered.keys()
