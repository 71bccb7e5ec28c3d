"""The payments: each service by itself, and all of them as processes."""

from __future__ import annotations

import signal
import uuid
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from fastapi.testclient import TestClient

from examples.payments import checks, detection, profiles, relations
from examples.payments.payments import Known, Payment, expect, read_payments
from examples.payments.servers import GROUPS, make_tables
from examples.payments.services import Port
from jobs_lib import migrate
from jobs_lib.app import load_app
from jobs_lib.operating.pauses import pause, resume
from jobs_lib.postgres.database import Database
from jobs_lib.settings import load_settings
from jobs_lib.testing import make_record
from tests.support import create_topic, delete_topics
from tests.support.records import produce, read_committed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import Record
    from tests.support import Worker

PAYMENTS = [
    Payment(1, "N1", "IAH", 100),
    Payment(2, "N1", "IAH", 200),
    Payment(3, "N2", "IAH", 500),
    Payment(4, "N1", "MIA", 700),
]
KNOWN = {
    1: Known(1, 1, 100),
    2: Known(2, 2, 300),
    3: Known(1, 1, 500),
    4: Known(1, 3, 1_000),
}


def make_records(payments: list[Payment]) -> list[Record[Payment]]:
    return [
        make_record(one, key=one.payer, topic="payments", offset=offset)
        for offset, one in enumerate(payments)
    ]


def make_answer(found: dict[int, Any], _: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=found)


def test_what_should_be_known_follows_from_the_payments_alone():
    assert expect(PAYMENTS) == KNOWN


class TestFacts:
    """Each fact of the demo holds for a good run, and for no bad one."""

    @pytest.mark.parametrize(
        ("handled", "holds"),
        [([4, 3, 2, 1], True), ([1, 2, 3], False), ([1, 2, 3, 4, 4], False)],
        ids=["good", "lacking", "twice"],
    )
    def test_every_payment_is_handled_once(self, handled, holds):
        assert checks.handled_once(KNOWN, handled).holds is holds

    def test_every_answer_is_right(self):
        assert checks.answers_right(KNOWN, KNOWN).holds
        assert not checks.answers_right(KNOWN, {**KNOWN, 4: Known(2, 3, 1_000)}).holds
        assert not checks.answers_right(KNOWN, {1: KNOWN[1]}).holds

    def test_nothing_is_missing(self):
        assert checks.nothing_missing({"detection": 0, "screening": 0}).holds
        assert not checks.nothing_missing({"detection": 0, "screening": 1}).holds

    def test_the_other_services_know_every_payment(self):
        assert checks.others_complete(KNOWN, {"relations": 4, "profiles": 4}).holds
        assert not checks.others_complete(KNOWN, {"relations": 4, "profiles": 3}).holds

    @pytest.mark.parametrize(
        ("handled", "holds"),
        [({0: 4, 1: 2}, True), ({0: 4, 1: 1}, False), ({0: 4}, False)],
        ids=["good", "behind", "none"],
    )
    def test_the_last_record_of_each_partition_is_handled(self, handled, holds):
        assert checks.last_handled({0: 5, 1: 3, 2: 0}, handled).holds is holds


class TestOneService:
    """A service alone, with the test kit."""

    @pytest.fixture
    def name(self, request) -> str:
        return str(request.param)

    @pytest.fixture
    def jobs_app(self, name):
        return load_app(f"examples.payments.{name}:app")

    @pytest.fixture
    def tables(self, jobs, name) -> None:
        with jobs.transaction() as conn:
            make_tables(conn, name)

    @pytest.mark.parametrize("name", ["relations"], indirect=True)
    @pytest.mark.usefixtures("tables")
    def test_relations_counts_payments_and_leaves_repeated_ones_as_they_are(self, jobs):
        records = make_records(PAYMENTS)
        for block in (records[:1], records, records[2:]):
            jobs.handle(relations.relate, block)
        with TestClient(relations.web) as api:
            found = api.post("/", json=[1, 2, 3, 4, 5]).json()
        assert found == {str(n): known.times for n, known in KNOWN.items()}

    @pytest.mark.parametrize("name", ["profiles"], indirect=True)
    @pytest.mark.usefixtures("tables")
    def test_profiles_adds_up_by_jobs_and_leaves_repeated_ones_as_they_are(self, jobs):
        records = make_records(PAYMENTS)
        for block in (records[:1], records):
            jobs.handle(profiles.note, block)
        jobs.drain()
        jobs.handle(profiles.note, records)
        jobs.drain()
        with TestClient(profiles.web) as api:
            found = api.post("/", json=[1, 2, 3, 4, 5]).json()
        assert found == {str(n): [k.payments, k.cents] for n, k in KNOWN.items()}

    @pytest.mark.parametrize("name", ["detection"], indirect=True)
    @pytest.mark.usefixtures("tables")
    def test_detection_counts_what_an_api_does_not_know(self, jobs, monkeypatch):
        times = {n: known.times for n, known in KNOWN.items()}
        totals = {n: (known.payments, known.cents) for n, known in KNOWN.items()}
        del totals[4]
        for api, found in ((detection.relations, times), (detection.profiles, totals)):
            answer = httpx.MockTransport(partial(make_answer, found))
            client = httpx.Client(base_url="http://api", transport=answer)
            monkeypatch.setattr(api, "_client", client)
        records = make_records(PAYMENTS)
        jobs.handle(detection.detect, records[:3])
        jobs.handle(detection.detect, records[3:])
        with jobs.transaction() as conn:
            missing = conn.execute("select * from missing").fetchall()
            checked = conn.execute("select payment, suspicious from checked").fetchall()
        assert missing == [("profiles", 4)]
        assert dict(checked) == {1: False, 2: False, 3: False, 4: False}
        assert detection.is_suspicious(PAYMENTS[3], *asdict(KNOWN[4]).values())


@pytest.fixture
def environment(kafka_admin) -> Iterator[str]:
    """An environment for this test alone, with the topic."""
    name = f"t{uuid.uuid4().hex[:10]}"
    create_topic(kafka_admin, f"{name}.payments", 2)
    yield name
    delete_topics(kafka_admin, [f"{name}.payments"])


class Services:
    """All services of the example, each a process, and its API if it has one."""

    def __init__(self, run_process, env: dict[str, str], urls: dict[str, str]) -> None:
        self.urls = urls
        self._run = run_process
        self._env = env
        self._ports: dict[str, Port] = {}
        self._workers: dict[str, list[Worker]] = {}

    def keep(self, name: str, port: Port) -> None:
        """Give a service an API, at this port."""
        self._ports[name] = port
        self._env[f"{name.upper()}_URL"] = port.url

    def start(self, name: str) -> None:
        env = {**self._env, "JOBS_LIB_DATABASE_URL": self.urls[name]}
        module = f"examples.payments.{name}"
        commands = [["jobs_lib.cli", "run", f"{module}:app"]]
        if name in self._ports:
            port = str(self._ports[name].number)
            commands.append(["uvicorn", f"{module}:web", "--port", port])
        self._workers[name] = [self._run("-m", *one, env=env) for one in commands]

    def stop(self, name: str) -> None:
        for worker in self._workers[name]:
            worker.signal(signal.SIGTERM)
        for worker in self._workers[name]:
            worker.wait(timeout=60)

    def describe(self) -> str:
        return "\n".join(
            worker.output for workers in self._workers.values() for worker in workers
        )

    def read(self, name: str, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.urls[name]) as conn:
            return conn.execute(query).fetchall()

    def count(self, name: str, table: str) -> int:
        ((rows,),) = self.read(name, f"select count(*) from {table}")
        return int(rows)


@pytest.fixture
def urls(jobs_databases, environment) -> Iterator[dict[str, str]]:
    """A database for each service."""
    settings = load_settings(environment=environment)
    with ExitStack() as stack:
        made = {name: stack.enter_context(jobs_databases.fresh()) for name in GROUPS}
        for name, url in made.items():
            migrate(url, settings=settings)  # the database serves this environment
            with psycopg.connect(url) as conn:
                make_tables(conn, name)
        yield made


# The processes end before their databases and their topic.
@pytest.fixture
def services(bootstrap_servers, environment, urls, run_process) -> Iterator[Services]:
    env = {
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
        "JOBS_LIB_ENVIRONMENT": environment,
        "JOBS_LIB_GATE_REFRESH": "0.1",
        "JOBS_LIB_GROUP_HEARTBEAT_INTERVAL": "0.3",
    }
    made = Services(run_process, env, urls)
    with ExitStack() as stack:
        for name in ("relations", "profiles"):
            made.keep(name, stack.enter_context(closing(Port())))
        yield made


@pytest.mark.timeout(300)
@pytest.mark.guarantee("K2", "K3", "K19", "K22")
def test_detection_waits_for_profiles_and_its_jobs_and_screening_does_not(
    services, bootstrap_servers, environment, wait_for
):
    payments = read_payments(2_000)
    topic = f"{environment}.payments"
    profiles_database = Database(services.urls["profiles"], "jobs_lib")

    def send(part: list[Payment]) -> None:
        records = [(one.payer, asdict(one)) for one in part]
        produce(bootstrap_servers, topic, records)

    def wait_for_count(name: str, table: str, count: int) -> None:
        wait_for(
            lambda: services.count(name, table) >= count,
            timeout=90,
            what=lambda: f"{table} has {count} rows\n{services.describe()}",
        )

    def has_moved_on() -> bool:
        group = f"{environment}.profiles"
        offsets = read_committed(bootstrap_servers, group, topic) or {}
        return sum(offsets.values()) == 500

    # It handles its records, and their jobs do not run.
    pause(profiles_database, "type", profiles.add_up.name)
    for name in GROUPS:
        services.start(name)
    send(payments[:500])
    wait_for(has_moved_on, timeout=90, what="profiles has moved on")
    send(payments[500:1_000])
    wait_for_count("screening", "screened", 1_000)
    assert services.count("detection", "checked") == 0
    resume(profiles_database, "type", profiles.add_up.name)
    wait_for_count("detection", "checked", 1_000)

    services.stop("profiles")
    send(payments[1_000:])
    wait_for_count("screening", "screened", 2_000)
    assert services.count("detection", "checked") == 1_000
    services.start("profiles")
    wait_for_count("detection", "checked", 2_000)

    for name in ("detection", "screening"):
        assert services.read(name, "select * from missing") == []
    checked = services.read(
        "detection", "select payment, times, payments, cents from checked"
    )
    expected = expect(payments)
    # It went on with the same record: none was left out, and none came twice.
    assert checks.handled_once(expected, [row[0] for row in checked]).holds
    assert checks.answers_right(expected, {n: Known(*k) for n, *k in checked}).holds
