"""A read model of all real flights ends equal to its source, whatever is done to it."""

from __future__ import annotations

import json
import random
import threading
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import pytest

from examples.flights.flights import read_flights
from tests.support.records import make_producer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from tests.support import Worker

APP = "tests.support.model_service:app"
FLIGHTS = 336_776
PARTITIONS = 8
BATCH = 20_000
TABLES = """
create table source (id text primary key, version bigint not null, n int not null);
create table model (id text primary key, version bigint, n int, twice int);
create table model_v2 (id text primary key, version bigint, n int, thrice int)
"""
DIFFERENCES = """
select count(*) from source s full join model m using (id)
where (s.version, s.n) is distinct from (m.version, m.n) or m.{} <> {} * s.n
"""


class Owner:
    """The owner of the flights: writes its table, and publishes each state."""

    def __init__(self, connection: psycopg.Connection[Any], servers: str, topic: str):
        self._connection = connection
        self._producer = make_producer(servers)
        self._topic = topic
        self._lock = threading.Lock()
        self._states: dict[str, tuple[int, int]] = {}
        """The version and the number of each flight."""

    def publish(self, changes: dict[str, int]) -> None:
        """Give flights other numbers."""
        with self._lock:
            new = {
                key: (self._states.get(key, (0, 0))[0] + 1, n)
                for key, n in changes.items()
            }
            self._states |= new
            with self._connection.cursor().copy(
                "copy pg_temp.changes from stdin"
            ) as copy:
                for key, (version, n) in new.items():
                    copy.write_row((key, version, n))
            self._connection.execute(
                "with gone as (delete from pg_temp.changes returning *)"
                " insert into source select * from gone on conflict (id)"
                " do update set version = excluded.version, n = excluded.n"
            )
            for key, (version, n) in new.items():
                headers: dict[str, str | bytes | None] = {"ce_version": str(version)}
                value = json.dumps({"n": n})
                self._producer.produce(self._topic, value, key, headers=headers)
                self._producer.poll(0)
            assert self._producer.flush(60) == 0


@pytest.fixture
def owner(connect, admin, bootstrap_servers, topic):
    """The owner, with all flights published."""
    admin.execute(TABLES)
    name = topic(PARTITIONS, config={"cleanup.policy": "compact"})
    with connect() as connection:
        connection.autocommit = True
        connection.execute("create temp table changes (like source)")
        one = Owner(connection, bootstrap_servers, name)
        flights = read_flights()
        assert len(flights) == FLIGHTS
        for first in range(0, FLIGHTS, BATCH):
            batch = flights[first : first + BATCH]
            one.publish({str(flight.id): flight.delay or 0 for flight in batch})
        yield one


@pytest.fixture
def changing(owner) -> Iterator[threading.Event]:
    """Change flights all the time, unless the event is cleared."""
    may_go_on, stop = threading.Event(), threading.Event()
    may_go_on.set()

    def change() -> None:
        while not stop.is_set():
            if may_go_on.wait(0.1):
                keys = random.sample(range(1, FLIGHTS + 1), 50)
                owner.publish({str(key): random.randrange(1000) for key in keys})

    thread = threading.Thread(target=change)
    thread.start()
    yield may_go_on
    stop.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.expects("fenced")
@pytest.mark.guarantee("I27", "W64", "W71", "W82")
def test_a_model_of_all_flights_is_resynchronised_replayed_verified_and_switched(
    owner,
    changing,
    admin,
    connect,
    database_url,
    bootstrap_servers,
    run_process,
    wait_for,
):
    def start(words: str, versions: tuple[int, ...] = (1,)) -> Worker:
        given = {
            "url": database_url,
            "kafka_bootstrap_servers": bootstrap_servers,
            "topic": owner._topic,
            "pod": f"pod-{random.randrange(10**9)}",
            "versions": versions,
        }
        env = {"MODEL": json.dumps(given), "SOURCE_DATABASE_URL": database_url}
        return run_process("-m", "jobs_lib.cli", *words.split(), env=env)

    def call(words: str, versions: tuple[int, ...] = (1,), code: int = 0) -> str:
        worker = start(words, versions)
        assert worker.wait(timeout=300) == code, worker.output
        return worker.output

    def count(query: str) -> int:
        row = admin.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def kill_one(versions: tuple[int, ...] = (1,)) -> None:
        victim = services.pop(random.randrange(len(services)))
        victim.kill()
        services.append(start(f"run {APP}", versions))

    def await_equality(column: str = "twice", factor: int = 2) -> None:
        changing.clear()
        query = DIFFERENCES.format(column, factor)
        wait_for(
            lambda: count(query) == 0,
            timeout=240,
            what=lambda: f"{count(query)} rows differ",
        )
        changing.set()

    services = [start(f"run {APP}") for _ in range(2)]
    await_equality()
    # Wrong rows, lost rows, and rows of which the topic knows nothing.
    with connect() as spoiling:
        # Or it and the consumers might wait for each other's rows.
        spoiling.execute("lock table model in share row exclusive mode")
        spoiling.execute("update model set n = -1, twice = null where id::int % 10 = 0")
        spoiling.execute("delete from model where id::int % 10 = 1")
        spoiling.execute(
            "insert into model select 'x' || n, 1, 0, 0 from generate_series(1, 99) n"
        )
    first = start(f"readmodel resync {APP} model")
    shown = "select count(*) from jobs_lib.resync_keys"
    wait_for(lambda: 0 < count(shown) < FLIGHTS // 2, timeout=240, what="half is done")
    first.kill()
    kill_one()
    call(f"readmodel resync {APP} model")
    await_equality()
    call(f"readmodel replay {APP} {owner._topic} --from-start")
    for _ in range(3):
        kill_one()
    await_equality()
    table = "--table source --key id"
    call(f"readmodel verify {APP} model {table}")
    admin.execute("update model set version = version - 1 where id = '77'")
    said = call(f"readmodel verify {APP} model {table} --json", code=1)
    (listed,) = (line for line in said.splitlines() if line.startswith("["))
    found = json.loads(listed)
    assert [(one["key"], one["what"]) for one in found] == [("77", "older")]
    admin.execute("update model set version = version + 1 where id = '77'")
    both = (1, 2)
    for _ in range(2):
        kill_one(both)
    wait_for(
        lambda: count("select count(*) from model_v2") > FLIGHTS // 2,
        timeout=240,
        what="the second version is half full",
    )
    kill_one(both)
    call(f"readmodel switch {APP} model 2 --wait 240", both)
    kill_one(both)
    await_equality("thrice", 3)
    for one in services:
        one.signal(SIGTERM)
        assert one.wait(timeout=60) == 0
