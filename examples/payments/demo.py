"""The whole example at once: `python -m examples.payments.demo`.

Real flights, as payments, go through four services, while something goes wrong with
each of them by turns. At the end the demo reads the data that are left, and prints
which facts hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from rich.console import Console
from rich.table import Table

from examples.flights.pods import Processes
from examples.payments import checks
from examples.payments.faults import SETTINGS, Faults
from examples.payments.payments import Known, Payment, expect, read_payments
from examples.payments.servers import GROUPS, PARTITIONS, TOPIC, Servers
from examples.payments.services import Port, Service
from jobs_lib import JobsError
from jobs_lib.devstack import DevStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.flights.checks import Fact

FOLDER = Path(".jobs-lib/payments")
LOGS = FOLDER / "logs"
REPORT = Path("build/payments.json")
STALLED_SECONDS = 180.0
TELL_SECONDS = 5.0
APIS = ("relations", "profiles")
CALLERS = ("detection", "screening")
TABLES = {"relations": "relations", "profiles": "profiles", "screening": "screened"}
HANDLED = """
    select coalesce(sum(coalesce(done_offset, next_offset)), 0)::bigint
    from jobs_lib.offsets
"""


class Run:
    """The services, and how far each of them is."""

    def __init__(self, servers: Servers, processes: Processes) -> None:
        self._servers = servers
        self._processes = processes
        self._begun = time.monotonic()
        self._told_at = 0.0
        self.produced = 0

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self._begun:7.1f} s  {text}", flush=True)

    def produce(self, payments: list[Payment]) -> None:
        """Send payments; called in a thread of its own."""
        self._servers.produce(payments)
        self.produced += len(payments)

    def wait_for_detection(self, count: int) -> None:
        """Wait until detection has handled so many payments."""
        self.wait(lambda numbers: numbers["detection"] >= count)

    def wait(self, condition: Callable[[dict[str, int]], bool]) -> None:
        """Wait until a condition of the numbers holds, as long as anything moves."""
        before: dict[str, int] = {}
        moved_at = time.monotonic()
        while True:
            self._processes.check()
            numbers = {
                name: int(self._servers.read(name, HANDLED)[0][0]) for name in GROUPS
            }
            now = time.monotonic()
            if numbers != before:
                before, moved_at = numbers, now
            if condition(numbers):
                self._tell(numbers)
                return
            if now > moved_at + STALLED_SECONDS:
                self._tell(numbers)
                self.say("nothing moves any more")
                return
            if now > self._told_at + TELL_SECONDS:
                self._tell(numbers)
            time.sleep(0.25)

    def _tell(self, numbers: dict[str, int]) -> None:
        self._told_at = time.monotonic()
        all_ = {"produced": self.produced, **numbers}
        self.say(", ".join(f"{name} {count:,}" for name, count in all_.items()))


def main() -> int:
    """Run the demo; return 0 if all facts hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    limit = _read_limit()
    stack = DevStack(FOLDER)
    try:
        addresses = {server.key: server.address or "" for server in stack.up()}
        servers = Servers(addresses["postgres"], addresses["kafka"])
        servers.make_topic()
        for name in GROUPS:
            servers.make_database(name)
        payments = read_payments(limit)
        begun = time.monotonic()
        turns = _run(servers, payments)
        seconds = time.monotonic() - begun
        facts = _check(servers, payments)
    finally:
        stack.down()
    return _summarize(len(payments), seconds, turns, facts)


def _run(servers: Servers, payments: list[Payment]) -> list[str]:
    """Send all payments through the services, with a part of them for each fault."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(LOGS))
        ports = {name: stack.enter_context(closing(Port())) for name in APIS}
        services = _start(servers, processes, ports)
        run = Run(servers, processes)
        turns = list(Faults(servers, services).list_turns())
        size = -(-len(payments) // (len(turns) + 1))
        run.produce(payments[:size])
        for number, (what, do) in enumerate(turns, 1):
            run.wait_for_detection(run.produced)
            run.say(what)
            part = payments[number * size : (number + 1) * size]
            producing = threading.Thread(target=run.produce, args=(part,))
            producing.start()
            do()
            producing.join()
        run.wait(lambda numbers: set(numbers.values()) == {run.produced})
    return [what for what, _ in turns]


def _start(
    servers: Servers, processes: Processes, ports: dict[str, Port]
) -> dict[str, Service]:
    """Start all services at once: nobody has to be there first."""
    urls = {f"{name.upper()}_URL": port.url for name, port in ports.items()}
    services = {}
    for name in GROUPS:
        env = {
            **SETTINGS,
            **urls,
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": servers.kafka,
            "JOBS_LIB_DATABASE_URL": servers.find_url(name),
        }
        services[name] = Service(name, processes, env, ports.get(name))
        services[name].start()
    return services


def _check(servers: Servers, payments: list[Payment]) -> list[Fact]:
    """Read all data that are left, and compare them with the payments."""
    expected = expect(payments)
    checked = servers.read(
        "detection", "select payment, times, payments, cents from checked"
    )
    lasts = "select partition, max(record_offset) from checked group by partition"
    missing = {name: _count(servers, name, "missing") for name in CALLERS}
    counts = {name: _count(servers, name, table) for name, table in TABLES.items()}
    return [
        checks.nothing_missing(missing),
        checks.handled_once(expected, [row[0] for row in checked]),
        checks.answers_right(expected, {row[0]: Known(*row[1:]) for row in checked}),
        checks.others_complete(expected, counts),
        checks.last_handled(
            _read_ends(servers.kafka), dict(servers.read("detection", lasts))
        ),
    ]


def _count(servers: Servers, name: str, table: str) -> int:
    return int(servers.read(name, f"select count(*) from {table}")[0][0])


def _read_ends(kafka: str) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "payments-demo"})
    with closing(consumer):
        return {
            number: consumer.get_watermark_offsets(TopicPartition(TOPIC, number), 30)[1]
            for number in range(PARTITIONS)
        }


def _summarize(
    payments: int, seconds: float, turns: list[str], facts: list[Fact]
) -> int:
    table = Table("", "checked", "measured", title=f"{payments:,} payments")
    for fact in facts:
        mark = "[green]✔[/green]" if fact.holds else "[red]✘[/red]"
        table.add_row(mark, fact.name, fact.measured)
    Console().print(table)
    holds = all(fact.holds for fact in facts)
    REPORT.parent.mkdir(exist_ok=True)
    report = {
        "holds": holds,
        "seconds": round(seconds, 1),
        "payments": payments,
        "turns": turns,
        "facts": [asdict(fact) for fact in facts],
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{'all true' if holds else 'not all true'}; see {REPORT}")
    return 0 if holds else 1


def _read_limit() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payments", default="all", help="how many, or all of them")
    text = parser.parse_args().payments
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 100:
        parser.error(f"--payments is {text!r}: say all, or a number from 100 on")
    return int(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
    except JobsError as error:
        sys.exit(f"error: {error}")
