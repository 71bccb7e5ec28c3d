"""How fast events are published and acknowledged: `python -m benchmarks.publish`.

64 threads publish to a stream and wait for each event, beside as many that do so with
confluent-kafka alone. Both producers have the same settings, and the same values.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from benchmarks.figures import median, percentile, ratio
from benchmarks.server import Server
from jobs_lib import App
from jobs_lib.devstack import KafkaBroker
from jobs_lib.kafka.configuration import configure_publisher
from jobs_lib.operating.topics import apply_topics
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLERS = 64
SECONDS = 0.5
"""Of a round. Both fall into faster and slower beats with the broker, from round to
round: many short ones tell more than few long ones."""
ROUNDS = 80
TOPIC = "tenants"


@dataclass
class Tenant:
    """The values of the events."""

    id: str
    email: str
    country: str


def main() -> None:
    """Measure by turns, and print one line of JSON."""
    with KafkaBroker.ephemeral() as broker, Server() as server:
        print(json.dumps(measure_publish(server, broker)))


def measure_publish(
    server: Server, broker: KafkaBroker, rounds: int = ROUNDS
) -> dict[str, float]:
    """Publish events by turns with ours and with the bare client."""
    server.renew()
    migrate(server.url)
    settings = load_settings(
        kafka_bootstrap_servers=broker.bootstrap_servers, database_url=server.url
    )
    app = App("benchmark", settings=settings)
    stream = app.stream(TOPIC, value=Tenant)
    apply_topics(app)
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    waits: dict[str, list[float]] = {"ours": [], "bare": []}
    with bare(Producer(configure_publisher(settings, "all", 10.0))) as publish:
        for turn in range(rounds + 1):
            by_name = {
                "ours": measure(lambda one: stream.publish(one.id, one)),
                "bare": measure(publish),
            }
            if turn:  # the first one warms both
                for name, (found, seconds) in by_name.items():
                    rates[name].append(found)
                    waits[name] += seconds
    app.close()
    ours, theirs = (median(rates[name]) for name in ("ours", "bare"))
    p50, bare_p50 = (percentile(waits[name], 0.5) for name in ("ours", "bare"))
    return {
        "publish_vs_bare": round(ratio(ours, theirs) or 0.0, 3),
        "publish_p50_ms": round(1000 * (p50 or 0.0), 2),
        "bare_p50_ms": round(1000 * (bare_p50 or 0.0), 2),
        "publish_p50_vs_bare": round(ratio(p50, bare_p50) or 0.0, 3),
        "published_s": round(ours or 0.0),
        "publish_callers": CALLERS,
    }


def measure(publish: Callable[[Tenant], object]) -> tuple[float, list[float]]:
    """Let all callers publish for a time; returns events/s, and the waits."""
    until = time.monotonic() + SECONDS
    waits: list[float] = []

    def call(caller: int) -> None:
        tenant = Tenant(f"t{caller}", f"{caller}@example.org", "DE")
        while (started := time.monotonic()) < until:
            publish(tenant)
            waits.append(time.monotonic() - started)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return len(waits) / SECONDS, waits


@contextmanager
def bare(producer: Producer) -> Iterator[Callable[[Tenant], object]]:
    """Publish with Kafka's client alone: a thread polls, and each caller waits."""
    stopping = threading.Event()

    def poll() -> None:
        while not stopping.is_set():
            producer.poll(0.5)

    def publish(tenant: Tenant) -> None:
        future: Future[int | None] = Future()
        value = json.dumps(asdict(tenant)).encode()
        producer.produce(
            TOPIC,
            value,
            tenant.id,
            on_delivery=lambda error, message: (
                future.set_exception(RuntimeError(str(error)))
                if error
                else future.set_result(message.offset())
            ),
        )
        future.result()

    thread = threading.Thread(target=poll)
    thread.start()
    yield publish
    stopping.set()
    thread.join()


if __name__ == "__main__":
    main()
