"""The whole example at once: `python -m examples.flights.demo`.

Real flights go through two services and a partner, while a pod is killed and all
aircraft are re-exported. At the end the demo checks the data that are left, and prints
which facts hold.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psycopg
from rich.console import Console
from rich.table import Table

from examples.flights import checks, evidence
from examples.flights.evidence import OwnerWatch
from examples.flights.flights import Flight, read_flights
from examples.flights.history import RETIRED, write_history
from examples.flights.pods import BOARD, SERVICE, Pod, Processes
from examples.flights.producer import produce_flights
from examples.flights.screen import Goal, Numbers, Screen, Watch
from examples.flights.servers import PARTITIONS, Servers
from jobs_lib import JobsError
from jobs_lib.devstack import DevStack

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from examples.flights.checks import Fact

Found = TypeVar("Found")

FOLDER = Path(".jobs-lib/demo")
LOGS = FOLDER / "logs"
ARRIVALS = FOLDER / "arrivals.jsonl"
HISTORY = FOLDER / "history.parquet"
REPORT = Path("build/demo.json")
FLIGHTS = "30000"
FIRST_PART, FIRST_SECONDS, SECOND_SECONDS = 0.6, 60.0, 50.0
"""How long the flights take to be produced.

If Spark starts slowly, the second part waits for the re-export, so that flights run
beside it.
"""
REEXPORT_SECONDS = 100.0
"""How long all aircraft would take at the rate.

Many are left out, since a newer state is on its way; the others fill the minute that is
measured.
"""
REPAIR_RATE = "6000"
SESSION_TIMEOUT = 6.0
PATIENCE = "2"
"""Seconds beyond a session for which partitions may lack an owner after a crash. A
machine that has much else to do needs more."""
START_SECONDS = 60.0
SETTINGS = {
    "JOBS_LIB_SESSION_TIMEOUT": f"{SESSION_TIMEOUT:g}",
    "JOBS_LIB_GROUP_HEARTBEAT_INTERVAL": "0.3",
    "JOBS_LIB_STALE_AFTER": "3",
    "JOBS_LIB_FOLLOW_INTERVAL": "0.2",
}


@dataclass
class Story:
    """What the demo did; the facts are checked against it."""

    killed_at: datetime
    taken: dict[str, datetime | None]
    known: list[str]
    """The aircraft at the start of the re-export."""
    reexport_at: float
    rate: int


def main() -> int:
    """Run the demo; return 0 if all facts hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    screen = Screen(Console())
    limit, patience = _read_limit(), _read_patience()
    stack = DevStack(FOLDER, progress=lambda n, m: screen.show("Kafka's jars", n, m))
    try:
        with screen:
            screen.say("starting PostgreSQL and Kafka, reading the flights")
            with ThreadPoolExecutor() as pool:
                reading = pool.submit(read_flights, limit)
                addresses = {server.key: server.address or "" for server in stack.up()}
                screen.say(" and ".join(addresses.values()))
                servers = Servers.at(addresses["postgres"], addresses["kafka"])
                servers.make_databases()
                servers.make_topics()
                flights = reading.result()
            screen.say(f"two databases, two topics and {len(flights):,} flights")
            story = _fly(screen, servers, flights)
            facts = _check(servers, flights, story, SESSION_TIMEOUT + patience)
    finally:
        stack.down()
    return _summarize(screen, len(flights), facts)


def _fly(screen: Screen, servers: Servers, flights: list[Flight]) -> Story:
    """Send all flights through both services; crash a pod and re-export meanwhile."""
    LOGS.mkdir(parents=True, exist_ok=True)
    ARRIVALS.write_bytes(b"")
    with Processes(LOGS) as processes, OwnerWatch(servers.flights_url) as owners:
        env = _start_partner_and_board(processes, servers)
        _, pod_b = (Pod(name, processes, env) for name in ("pod-a", "pod-b"))
        for name in ("pod-a", "pod-b"):
            _wait_for(partial(owners.owned_by, name), processes)
        screen.say("pod-a and pod-b share the partitions; the flights begin")
        watch = Watch(servers.flights_url, servers.board_url, ARRIVALS)
        goal = Goal.of(flights)

        def wait(condition: Callable[[Numbers], bool]) -> None:
            def show(numbers: Numbers) -> None:
                processes.check()
                screen.show_numbers(numbers, goal)

            if not watch.until(condition, show):
                screen.say("[red]nothing moves any more[/red]")

        def tell() -> None:
            watch.numbers.produced += 1

        def produce() -> None:
            first = int(len(flights) * FIRST_PART)
            produce_flights(flights[:first], servers.kafka, FIRST_SECONDS, tell)
            while not watch.numbers.again:
                time.sleep(0.1)
            produce_flights(flights[first:], servers.kafka, SECOND_SECONDS, tell)

        threading.Thread(target=produce, daemon=True).start()
        wait(lambda numbers: numbers.handled >= len(flights) / 5)

        owned = owners.owned_by("pod-b")
        killed_at = _now(servers.flights_url)
        pod_b.kill()
        screen.say(f"[red]pod-b killed[/red], it executed {len(owned)} partitions")
        time.sleep(2)
        Pod("pod-c", processes, env)
        screen.say("pod-c started in its place")

        known = list(evidence.read_rows(servers.flights_url, "aircraft"))
        rate = int(goal.aircraft * 60 / REEXPORT_SECONDS)
        reexport_at = time.time()
        command = ["jobs_lib.cli", "reexport", "start", "aircraft", "--rate", str(rate)]
        spark = processes.start("reexport", *command, "--app", SERVICE, env=env)
        screen.say(f"re-export of {len(known):,} aircraft by Spark, {rate:,} a minute")
        wait(lambda numbers: numbers.reach(goal) and spark.poll() is not None)
        _repair(screen, servers, processes, env, flights)
    return Story(killed_at, owners.taken(owned), known, reexport_at, rate)


def _repair(
    screen: Screen,
    servers: Servers,
    processes: Processes,
    env: dict[str, str],
    flights: list[Flight],
) -> None:
    """Fill the topic from a history, and remove the keys that the table has not."""
    rows = write_history(HISTORY, checks.expected_states(flights))
    screen.say(f"a Parquet history of {rows:,} states, all older but those of retired")

    def run(name: str, *arguments: str) -> None:
        command = ["jobs_lib.cli", "reexport", *arguments, "--rate", REPAIR_RATE]
        command += ["--watch", "--app", SERVICE]
        processes.start(name, *command, env=env).wait()
        processes.check()

    run("history", "start", "aircraft", "--parquet", str(HISTORY))
    screen.say("the history is sent, where the topic had nothing newer")
    run("stale", "stale", "aircraft")
    screen.say("the keys that only the topic had are removed")
    _wait_for(
        lambda: {*RETIRED}.isdisjoint(
            evidence.read_rows(servers.board_url, "aircraft_rm")
        ),
        processes,
    )


def _start_partner_and_board(processes: Processes, servers: Servers) -> dict[str, str]:
    """Start all but the pods; return the environment of a pod."""
    processes.start("partner", "examples.flights.partner", str(ARRIVALS), env={})
    said = LOGS / "partner.log"
    env = {
        **SETTINGS,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": servers.kafka,
        "JOBS_LIB_DATABASE_URL": servers.flights_url,
        "PARTNER_URL": _wait_for(lambda: said.read_text().strip(), processes),
    }
    board = {**env, "JOBS_LIB_DATABASE_URL": servers.board_url}
    processes.start("board", "jobs_lib.cli", "run", BOARD, env=board)
    declare = ["jobs_lib.cli", "topics", "declare", SERVICE, "flights", "--home"]
    processes.start("declare", *declare, env=env).wait()
    return env


def _check(
    servers: Servers, flights: list[Flight], story: Story, take_over: float
) -> list[Fact]:
    """Read all data that are left, and compare them."""
    handled = evidence.read_handled(servers.flights_url)
    aircraft = evidence.read_rows(servers.flights_url, "aircraft")
    read_model = evidence.read_rows(servers.board_url, "aircraft_rm")
    posts = evidence.read_posts(ARRIVALS)
    states = evidence.read_states(servers.kafka, PARTITIONS["aircraft-state"])
    expected = checks.expected_states(flights)
    without_tail = [flight for flight, tail in handled if tail is None]
    everything, states = states, [one for one in states if one.tail not in RETIRED]
    return [
        checks.processed_once(flights, [flight for flight, _ in handled]),
        checks.counted_apart(flights, without_tail, aircraft),
        checks.table_right(expected, aircraft),
        checks.partner_in_order(flights, posts),
        checks.topic_in_order(states),
        checks.topic_complete(expected, states),
        checks.read_model_equal(aircraft, read_model),
        checks.reexport_complete(story.known, story.reexport_at, states),
        checks.reexport_rate(states, story.rate),
        checks.history_filled(RETIRED, everything),
        checks.stale_removed(RETIRED, everything, read_model),
        checks.owners_found(story.killed_at, story.taken, take_over),
    ]


def _summarize(screen: Screen, flights: int, facts: list[Fact]) -> int:
    table = Table("", "checked", "measured", title=f"{flights:,} flights")
    for fact in facts:
        mark = "[green]✔[/green]" if fact.holds else "[red]✘[/red]"
        table.add_row(mark, fact.name, fact.measured)
    screen.console.print(table)
    holds = all(fact.holds for fact in facts)
    REPORT.parent.mkdir(exist_ok=True)
    report = {
        "holds": holds,
        "seconds": round(screen.seconds, 1),
        "flights": flights,
        "facts": [asdict(fact) for fact in facts],
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    screen.say(f"{'all true' if holds else '[red]not all true[/red]'}; see {REPORT}")
    return 0 if holds else 1


def _now(url: str) -> datetime:
    """The time of the database's clock."""
    with psycopg.connect(url) as connection:
        row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    now: datetime = row[0]
    return now


def _wait_for(found: Callable[[], Found], processes: Processes) -> Found:
    deadline = time.monotonic() + START_SECONDS
    while not (result := found()):
        processes.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"the services do not start: see {processes.logs}")
        time.sleep(0.1)
    return result


def _read_limit() -> int | None:
    text = os.environ.get("FLIGHTS") or FLIGHTS
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1_000:
        raise SystemExit(f"FLIGHTS is {text!r}: say all, or a number from 1000 on")
    return int(text)


def _read_patience() -> float:
    text = os.environ.get("PATIENCE") or PATIENCE
    if not text.isdecimal():
        raise SystemExit(f"PATIENCE is {text!r}: say a whole number of seconds")
    return float(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
    except JobsError as error:
        sys.exit(f"error: {error}")
