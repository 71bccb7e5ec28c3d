"""Take-overs: from the end of a pod until its jobs run elsewhere."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ownership.pods import deployed, wait_until

if TYPE_CHECKING:
    import psycopg

    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row
    from jobs_lib.devstack import KafkaBroker

PARTITIONS = 12
_DEFAULTS = {"session_timeout": 45.0, "group_heartbeat_interval": 3.0}
"""The defaults of librdkafka."""
_BROKERS_SESSION = 45.0
"""The session of the new protocol, whose timeouts are the broker's: Kafka's default."""

KINDS: dict[str, dict[str, Any]] = {
    "member": {"assignment_strategy": "range"},
    "follow": {"assignment_strategy": "range", "sidecars": True},
    "cooperative": {"assignment_strategy": "cooperative-sticky"},
    "static": {"assignment_strategy": "range", "static_membership": True},
    "consumer_protocol": {"group_protocol": "consumer"},
    "librdkafka_defaults": {"assignment_strategy": "range", **_DEFAULTS},
}
_SLOW = {"consumer_protocol", "librdkafka_defaults"}
"""Their sessions last so long that one round must be enough."""

SLOW, SLOW_FOR = 10, 5.0
"""Jobs in flight when their pod is killed, and the seconds that each of them takes."""
BACKLOG, BACKLOG_FOR = 200, 0.05
"""Jobs of each origin that wait behind them, and the seconds that each takes."""


def measure(bench: Bench, broker: KafkaBroker) -> Figures:
    """Kill a pod, or end it properly: when do its jobs run elsewhere?"""
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


def measure_in_flight(bench: Bench, broker: KafkaBroker) -> Figures:
    """Kill a pod: when have the slow jobs that it had in flight run again?"""
    pieces = {
        "member": partial(run_again, bench, broker),
        "heartbeats": partial(run_again, bench, None),
    }
    rows = bench.alternate(pieces)
    return {
        "in_flight_again_over_session_s": rows["member"].median("over_s"),
        "in_flight_again_over_stale_s": rows["heartbeats"].median("over_s"),
    }


def take_over(bench: Bench, broker: KafkaBroker, kind: str, number: int) -> Row:
    """End one of two pods; count seconds until a job in each of its origins has run."""
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


def run_again(bench: Bench, broker: KafkaBroker | None, **settings: Any) -> Row:
    """Kill a pod with ten slow jobs in flight, while both pods have a backlog.

    The row has the seconds until the last of the ten has run again. It also has the
    excess of these over the time in which the pod still counts as alive plus the time
    of one handler.
    """
    slow_for = SLOW_FOR / 10 if bench.quick else SLOW_FOR
    given = {"workers": SLOW, **(KINDS["member"] if broker else {}), **settings}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(bench.server, broker, partitions=PARTITIONS, **given) as pods,
        bench.server.connect() as connection,
    ):
        pods.notes = Path(folder, "notes")
        pods.notes.touch()
        pods.start("pod-a", "pod-b")
        pods.await_shared(connection, "pod-a", "pod-b", seconds=120)
        owners = pods.owners(connection)
        theirs = sorted(o for o, (pod, _) in owners.items() if pod == "pod-a")
        places = [theirs[n % len(theirs)] for n in range(SLOW)]
        slow = _enqueue(connection, "linger", slow_for, places)
        wait_until(lambda: len(pods.read_notes()) == SLOW, 30, "all of them run")
        # The backlog is in all origins, so that the heir always has work of its own.
        backlog = pods.origins * bench.size(BACKLOG)
        _enqueue(connection, "wait", BACKLOG_FOR, backlog)
        killed = time.monotonic()
        pods.pods["pod-a"].send(signal.SIGKILL)
        silence = pods.settings["session_timeout" if broker else "stale_after"]
        ended: list[float] = []

        def ran() -> bool:
            rows = connection.execute("select at from ran where job = any (%s)", [slow])
            ended[:] = [at for (at,) in rows]
            return len(ended) == SLOW

        wait_until(ran, silence + 200, "all have run again", pause=0.05)
        row = connection.execute("select count(*) from jobs_lib.jobs").fetchone()
        assert row is not None
        begun = [at for _, _, at in pods.read_notes()[SLOW:]]
    return {
        "s": max(ended) - killed,
        "over_s": max(ended) - killed - silence - slow_for,
        "last_begins_s": max(begun) - killed,
        "backlog_left": row[0],
    }


def _enqueue(
    connection: psycopg.Connection[Any], type_: str, seconds: float, origins: list[str]
) -> list[int]:
    """Enqueue a job of this length in each of these origins; return their ids."""
    rows = connection.execute(
        "select jobs_lib.enqueue(%s, %s, origin => o) from unnest(%s::text[]) o",
        (type_, json.dumps({"seconds": seconds}), origins),
    )
    return [job for (job,) in rows]
