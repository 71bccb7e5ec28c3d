"""Take-overs: from the end of a pod until its jobs run elsewhere."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.ownership.pods import deployed, wait_until

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row
    from jobs_lib.devstack import KafkaBroker

PARTITIONS = 12
_DEFAULTS = {"session_timeout": 45.0, "group_heartbeat_interval": 3.0}
"""librdkafka's own."""
_BROKERS_SESSION = 45.0
"""Of the new protocol, whose timeouts are the broker's: Kafka's default."""

KINDS: dict[str, dict[str, Any]] = {
    "member": {"assignment_strategy": "range"},
    "follow": {"assignment_strategy": "range", "sidecars": True},
    "cooperative": {"assignment_strategy": "cooperative-sticky"},
    "static": {"assignment_strategy": "range", "static_membership": True},
    "consumer_protocol": {"group_protocol": "consumer"},
    "librdkafka_defaults": {"assignment_strategy": "range", **_DEFAULTS},
}
_SLOW = {"consumer_protocol", "librdkafka_defaults"}
"""Their sessions last so long that one round has to do."""


def measure(bench: Bench, broker: KafkaBroker) -> Figures:
    """A pod is killed, or ends in order: when do its jobs run elsewhere?"""
    figures: Figures = {}
    for how, number in (("kill9", signal.SIGKILL), ("clean", signal.SIGTERM)):
        pieces = {
            f"{how} {kind}": partial(take_over, bench, broker, kind, number)
            for kind in KINDS
        }
        slow = {f"kill9 {kind}" for kind in _SLOW} & pieces.keys()
        rows = bench.alternate({n: p for n, p in pieces.items() if n not in slow})
        rows |= bench.alternate({name: pieces[name] for name in slow}, rounds=1)
        key = "over_session_s" if how == "kill9" else "s"
        for kind in KINDS:
            suffix = "" if kind == "member" else f"_{kind}"
            figures[f"takeover_{how}_{key}{suffix}"] = rows[f"{how} {kind}"].median(key)
    return figures


def take_over(bench: Bench, broker: KafkaBroker, kind: str, number: int) -> Row:
    """End one of two pods; seconds until a job in each of its origins has run."""
    settings = dict(KINDS[kind])
    sidecars = settings.pop("sidecars", False)
    with (
        deployed(
            bench.server, broker, partitions=PARTITIONS, sidecars=sidecars, **settings
        ) as pods,
        bench.server.connect() as connection,
    ):
        pods.start("pod-a", "pod-b")
        pods.await_shared(connection, "pod-a", "pod-b", seconds=120)
        ended = time.monotonic()
        pods.pods["pod-a"].send(number)
        jobs = pods.enqueue_marks(connection)
        session = (
            _BROKERS_SESSION
            if "group_protocol" in settings
            else pods.settings["session_timeout"]
        )

        def ran() -> bool:
            row = connection.execute(
                "select count(*) from ran where job = any (%s)", (jobs,)
            ).fetchone()
            return row == (len(jobs),)

        took = wait_until(ran, session + 60, f"all jobs run ({kind})") - ended
    row: Row = {"s": took}
    if number == signal.SIGKILL:
        row |= {"session_s": session, "over_session_s": took - session}
    return row
