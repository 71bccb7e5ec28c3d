"""Metrics for Prometheus: counters of the events, and other sources' figures.

Names have the prefix ``jobs_lib_``, base units, and ``_total`` where they only grow. No
label holds an id, a group of jobs or a key: each would be a time series of its own.

This needs the extra ``metrics``; import it only if that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    generate_latest,
)
from prometheus_client.core import Metric

from jobs_lib import telemetry

PREFIX = "jobs_lib_"
Source = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Counted:
    """A counter that an event increases."""

    event: str
    name: str
    """The name without the prefix and ``_total``."""
    text: str
    amount: str = ""
    """The field with the increase: a number, or a list whose items are counted. Without
    one, each event counts one."""
    labels: tuple[str, ...] = ()
    """The fields of the event that are labels."""


COUNTED = (
    Counted("jobs.claimed", "jobs_claimed", "Jobs claimed from the table.", "count"),
    Counted("job.failed", "job_failures", "Attempts that failed.", labels=("type",)),
    Counted("jobs.fenced", "jobs_fenced", "Jobs that others have taken.", "ids"),
    Counted("jobs.released", "jobs_released", "Jobs cut off by a stop.", "ids"),
    Counted("jobs.dropped", "jobs_dropped", "Jobs claimed, not begun in time.", "ids"),
    Counted("job.stuck", "jobs_stuck", "Jobs running beyond their time limit."),
    Counted("ticks.enqueued", "ticks", "Periodic jobs.", "ticks", ("schedule",)),
    Counted("ticks.dropped", "ticks_dropped", "Gaps in a schedule.", "", ("schedule",)),
    Counted("origins.taken", "origins_taken", "Origins taken.", "origins", ("role",)),
    Counted("origins.lost", "origins_lost", "Origins lost.", "origins", ("role",)),
    Counted("block.deleted", "outbox_relayed", "Rows relayed to Kafka.", "rows"),
    Counted("rows.held", "outbox_holds", "Keys or rows refused.", labels=("topic",)),
    Counted(
        "records.applied",
        "records_applied",
        "Records handled; what is not committed is handled, and counted, again.",
        amount="count",
        labels=("group",),
    ),
    Counted("record.failed", "record_failures", "Failed records.", labels=("group",)),
    Counted(
        "record.skipped", "records_skipped", "Skipped records.", "count", ("group",)
    ),
    Counted(
        "loop.failed",
        "loop_failures",
        "Failed rounds of a loop, such as in an outage.",
        labels=("loop", "sqlstate"),
    ),
    Counted("thread.ended", "threads_ended", "Threads that an error has ended."),
    Counted("thread.silent", "threads_silent", "Threads found to stand still."),
)


class Metrics:
    """This process's metrics. It listens to events from :meth:`start` on."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, tuple[Counted, Counter]] = {
            one.event: (
                one,
                Counter(
                    f"{PREFIX}{one.name}",
                    one.text,
                    one.labels,
                    registry=self.registry,
                ),
            )
            for one in COUNTED
        }
        self._stop: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to count."""
        self._stop = telemetry.listen(self._count, self._counters)

    def stop(self) -> None:
        """Stop counting."""
        self._stop()

    def add(self, source: Source) -> None:
        """Ask a function for more metrics at each scrape."""
        self.registry.register(_Collector(source))

    def render(self) -> tuple[str, bytes]:
        """The content type and the text: ours, and what the application registered.

        Ours alone, if a collector of the application raises.
        """
        own = generate_latest(self.registry)
        try:
            theirs = generate_latest(REGISTRY)
        except Exception as error:
            telemetry.emit("loop.failed", loop="probes", error=error)
            theirs = b""
        return CONTENT_TYPE_LATEST, own + theirs

    def _count(self, event: str, fields: dict[str, Any]) -> None:
        counted, counter = self._counters[event]
        if counted.labels:
            values = (fields.get(one) for one in counted.labels)
            counter = counter.labels(*("" if v is None else str(v) for v in values))
        counter.inc(_measure(fields.get(counted.amount, 1)))


class _Collector:
    """A collector that prometheus_client calls at each scrape."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Nothing: names need no comparison, because no two sources are alike."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families of the source."""
        return self._source()


def _measure(amount: Any) -> float:
    """A number itself, or the length of a collection."""
    return float(amount if isinstance(amount, int | float) else len(amount))
