"""A read model of all real flights ends equal to its source, whatever is done to it."""

from __future__ import annotations

import json
import random
import threading
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from examples.flights.flights import read_flights
from jobs_lib import capture_changes
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support import Worker

APP = "tests.support.model_service:app"
OWNER = "tests.support.flights_owner:app"
FLIGHTS = 336_776
PARTITIONS = 8
SOURCE = "create table source (id text primary key, version bigint, n int not null)"
TABLES = """
create table model (id text primary key, version bigint, n int, twice int);
create table model_v2 (id text primary key, version bigint, n int, thrice int)
"""
DIGEST = """
select count(*)::text || ' ' || coalesce(sum(
    ('x' || substr(md5(concat_ws(' ', id, version, n, {})), 1, 15))::bit(60)::bigint
), 0)::text from {}
"""
"""Of all rows: their number, and the sum of a hash of each."""


@pytest.fixture
def name(topic) -> str:
    """The topic of the flights."""
    return str(topic(PARTITIONS, config={"cleanup.policy": "compact"}))


@pytest.fixture
def source(empty_url, name) -> Iterator[psycopg.Connection[Any]]:
    """The owner's database, with all flights, whose changes are captured."""
    migrate(empty_url)
    flights = read_flights()
    assert len(flights) == FLIGHTS
    with psycopg.connect(empty_url, autocommit=True) as connection:
        connection.execute(SOURCE)
        capture_changes(connection, "source", topic=name, key="id")
        with connection.cursor().copy("copy source from stdin") as copy:
            for flight in flights:
                copy.write_row((flight.id, 1, flight.delay or 0))
        yield connection


@pytest.fixture
def changing(source, empty_url) -> Iterator[threading.Event]:
    """Change flights all the time, unless the event is cleared."""
    may_go_on, stop = threading.Event(), threading.Event()
    may_go_on.set()

    def change() -> None:
        with psycopg.connect(empty_url, autocommit=True) as connection:
            while not stop.is_set():
                if may_go_on.wait(0.1):
                    keys = random.sample(range(1, FLIGHTS + 1), 50)
                    connection.execute(
                        "update source set version = version + 1, n = %s"
                        " where id = any (%s)",
                        (random.randrange(1000), [*map(str, keys)]),
                    )

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
    source,
    empty_url,
    name,
    changing,
    admin,
    connect,
    database_url,
    bootstrap_servers,
    run_process,
    wait_for,
):
    admin.execute(TABLES)
    servers = {
        "kafka_bootstrap_servers": bootstrap_servers,
        "topic": name,
        # A busy machine makes no process count as dead.
        "heartbeat_interval": 1.0,
        "stale_after": 20.0,
    }

    def start(words: str, versions: tuple[int, ...] = (1,)) -> Worker:
        pod = f"pod-{random.randrange(10**9)}"
        model = {**servers, "url": database_url, "versions": versions, "pod": pod}
        owner = {**servers, "url": empty_url, "partitions": PARTITIONS, "pod": pod}
        env = {
            "MODEL": json.dumps(model),
            "OWNER": json.dumps(owner),
            "SOURCE_DATABASE_URL": empty_url,
        }
        return run_process("-m", "jobs_lib.cli", *words.split(), env=env)

    def call(words: str, versions: tuple[int, ...] = (1,), code: int = 0) -> str:
        worker = start(words, versions)
        assert worker.wait(timeout=300) == code, worker.output
        return str(worker.output)

    def ask(query: str, connection: psycopg.Connection[Any] = admin) -> Any:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]

    def kill_one(versions: tuple[int, ...] = (1,)) -> None:
        """Kill a process of either service, and start another one."""
        victim = services.pop(random.randrange(len(services)))
        victim.kill()
        services.append(start(f"run {APP}", versions))
        victim, owners[0] = owners[0], start(f"run {OWNER}")
        victim.kill()

    def await_equality(column: str = "twice", factor: int = 2) -> None:
        changing.clear()
        wanted = DIGEST.format(f"{factor} * n", "source")
        found = DIGEST.format(column, "model")
        wait_for(
            lambda: ask(wanted, source) == ask(found),
            timeout=240,
            what=lambda: f"{ask(wanted, source)} of the source is {ask(found)}",
        )
        changing.set()

    owners = [start(f"run {OWNER}")]
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
    shown = "select coalesce(sum(cardinality(keys)), 0) from jobs_lib.resync_shown"
    wait_for(lambda: ask(shown) > FLIGHTS // 2, timeout=240, what="half is done")
    first.kill()
    kill_one()
    call(f"readmodel resync {APP} model --processes 2")
    await_equality()
    call(f"readmodel replay {APP} {name} --from-start")
    for _ in range(3):
        kill_one()
    await_equality()
    table = "--table source --key id"
    call(f"readmodel verify {APP} model {table}")
    # A change of this very key would repair it.
    await_equality()
    changing.clear()
    admin.execute("update model set version = version - 1 where id = '77'")
    said = call(f"readmodel verify {APP} model {table} --json", code=1)
    (listed,) = (line for line in said.splitlines() if line.startswith("["))
    found = json.loads(listed)
    assert [(one["key"], one["what"]) for one in found] == [("77", "older")]
    admin.execute("update model set version = version + 1 where id = '77'")
    changing.set()
    both = (1, 2)
    for _ in range(2):
        kill_one(both)
    wait_for(
        lambda: ask("select count(*) from model_v2") > FLIGHTS // 2,
        timeout=240,
        what="the second version is half full",
    )
    kill_one(both)
    call(f"readmodel switch {APP} model 2 --wait 240", both)
    kill_one(both)
    await_equality("thrice", 3)
    for one in (*services, *owners):
        one.signal(SIGTERM)
        assert one.wait(timeout=60) == 0, one.output
