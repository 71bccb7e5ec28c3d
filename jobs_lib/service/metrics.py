"""The metrics of a running service that ``/metrics`` shows beside event counters."""

from __future__ import annotations

import math
import threading
import time
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from jobs_lib.executor.meter import BOUNDS, Histogram
from jobs_lib.loop import Loop
from jobs_lib.operating.depths import Consumed, Depths, read_consumed, read_depths
from jobs_lib.telemetry.metrics import COUNTED, PREFIX, Metrics
from jobs_lib.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from jobs_lib.consuming.measures import Lag, Measures
    from jobs_lib.executor.limiting.gate import JobGate
    from jobs_lib.executor.meter import Meter
    from jobs_lib.kafka.positions import Positions
    from jobs_lib.postgres.database import Database

_PAUSE = 15.0
"""Minimum of seconds between two reads of what waits."""
_MOST_PARTITIONS = 100
"""The most partitions of a consumer with figures of their own."""
_LAST_SECONDS = 1.0
"""Seconds that a stop waits for a read."""
_STALE = 60.0
"""Seconds after which the figures read are not shown any more: reading them fails."""
_SCRAPED_WITHIN = 300.0
"""Seconds after a scrape for which the next one is expected, and figures are read."""


class ServiceMetrics:
    """The metrics of one process.

    Args:
        database: where its jobs are.
        meters: finds the figures of its executors.
        owned: finds how many origins it owns, by role.
        consumers: finds the figures of its consumers.
        positions: finds what Kafka says of their topics.
        gates: finds what jobs wait for.
        pause: seconds between two reads of what waits in the database.
    """

    def __init__(
        self,
        database: Database,
        meters: Callable[[], Iterable[Meter]],
        owned: Callable[[], Mapping[str, int]],
        consumers: Callable[[], Collection[Measures]] = tuple,
        positions: Callable[[], Positions | None] = lambda: None,
        gates: Callable[[], Iterable[JobGate]] = tuple,
        *,
        pause: float = _PAUSE,
    ) -> None:
        self._metrics = Metrics()
        self._depths = _Reader(
            database,
            lambda: {one.group for one in consumers()},
            pause,
            ask_also=lambda: _find_lags(consumers(), positions()),
        )
        self._metrics.add(lambda: describe_jobs(list(meters())))
        self._metrics.add(lambda: [_describe_owned(owned())])
        self._metrics.add(lambda: describe_consumers(consumers(), positions()))
        self._metrics.add(lambda: [describe_gates(gates())])
        self._metrics.add(self._describe_depths)
        self._metrics.add(lambda: [_describe_build()])

    def start(self) -> None:
        """Begin to count, and to read what waits."""
        self._metrics.start()
        self._depths.start()

    def stop(self) -> None:
        """Stop counting."""
        self._metrics.stop()
        self._depths.stop()

    def render(self) -> tuple[str, bytes]:
        """Return the content type and the text, without asking any server."""
        return self._metrics.render()

    def _describe_depths(self) -> Iterator[Metric]:
        depths, consumed = self._depths.ask() or (None, None)
        yield from describe_depths(depths)
        yield from describe_consumed(consumed)


class _Reader:
    """Reads what waits, as long as something scrapes, in a thread of its own.

    A scrape gets the figures read last: it must not wait for the database. So it reads
    on between scrapes, however seldom those come.
    """

    def __init__(
        self,
        database: Database,
        groups: Callable[[], Collection[str]],
        pause: float,
        *,
        ask_also: Callable[[], object] = lambda: None,
    ) -> None:
        self._database = database
        self._groups = groups
        self._pause = pause
        self._ask_also = ask_also
        self._seen: tuple[float, Depths, Consumed] | None = None
        self._asked = threading.Event()
        self._asked_at = -math.inf
        self._loop = Loop("metrics", self._work)

    def start(self) -> None:
        # The first read comes with the first scrape: there may never be one.
        self._loop.start()

    def stop(self) -> None:
        self._loop.stopping.set()
        self._asked.set()
        # It only reads, and PostgreSQL may not answer.
        self._loop.stop(_LAST_SECONDS)

    def ask(self) -> tuple[Depths, Consumed] | None:
        """The figures read last; None if they are too old."""
        seen, now = self._seen, time.monotonic()
        self._asked_at = now
        self._asked.set()
        return None if seen is None or now > seen[0] + _STALE else seen[1:]

    def _work(self) -> Iterator[None]:
        while True:
            # In this order: a question that comes between the lines is not lost.
            self._asked.clear()
            is_over = time.monotonic() > self._asked_at + _SCRAPED_WITHIN
            if is_over and not self._loop.stopping.is_set():
                self._asked.wait()
            if self._loop.stopping.is_set():
                return
            self._ask_also()
            consumed = read_consumed(self._database, self._groups())
            self._seen = time.monotonic(), read_depths(self._database), consumed
            yield
            self._loop.stopping.wait(self._pause)


def describe_all() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, kind, labels and meaning of every metric that ``/metrics`` may show."""
    for one in COUNTED:
        yield f"{PREFIX}{one.name}_total", "counter", one.labels, one.text
    given = [describe_jobs([]), describe_depths(None)]
    given += [describe_consumers([], None), iter([describe_gates([])])]
    given += [describe_consumed(None)]
    for family in (*chain(*given), _describe_owned({}), _describe_build()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield (
            name,
            family.type,
            tuple(getattr(family, "_labelnames", ())),
            family.documentation,
        )


def describe_jobs(meters: Iterable[Meter]) -> Iterator[Metric]:
    """The outcomes of jobs, and how long they took."""
    finished: dict[tuple[str, str], int] = {}
    durations: dict[str, Histogram] = {}
    delays: dict[str, Histogram] = {}
    for meter in meters:
        for labels, count in meter.finished.copy().items():
            finished[labels] = finished.get(labels, 0) + count
        for of_all, own in ((durations, meter.durations), (delays, meter.delays)):
            for type_, histogram in own.copy().items():
                of_all.setdefault(type_, Histogram()).add(histogram)
    counter = CounterMetricFamily(
        f"{PREFIX}jobs_finished",
        "Outcomes that are written, one for each attempt.",
        labels=("type", "result"),
    )
    for labels, count in finished.items():
        counter.add_metric(labels, count)
    yield counter
    yield _describe_histograms(
        "job_duration_seconds", "From a handler's start to its end.", durations
    )
    yield _describe_histograms(
        "job_start_delay_seconds",
        "From the time at which a job was due to its handler's start.",
        delays,
    )


def _describe_histograms(
    name: str, text: str, histograms: Mapping[str, Histogram]
) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=("type",))
    names = [*map(str, BOUNDS), "+Inf"]
    for type_, histogram in histograms.items():
        buckets = list(zip(names, accumulate(histogram.counts), strict=True))
        family.add_metric((type_,), buckets, histogram.total)
    return family


def describe_depths(depths: Depths | None) -> Iterator[Metric]:
    """The figures of what waits in the database; none if they are not known."""
    jobs = GaugeMetricFamily(
        f"{PREFIX}queue_depth",
        "Unfinished jobs; of very many an estimate.",
        labels=("type", "state"),
    )
    gauges = {
        "queue_oldest_ready_age_seconds": "Age of the oldest job that may run.",
        "jobs_kept_discarded": "Discarded jobs that are kept.",
        "outbox_backlog": "Rows that are not in Kafka yet; of very many an estimate.",
        "outbox_oldest_age_seconds": "Age of the oldest of them.",
        "outbox_held": "Keys, and rows without one, that Kafka has refused.",
    }
    families = {
        name: GaugeMetricFamily(PREFIX + name, text) for name, text in gauges.items()
    }
    if depths is None:
        yield from (jobs, *families.values())
        return
    for labels, count in depths.jobs.items():
        jobs.add_metric(labels, count)
    values = (
        *(depths.oldest_job, depths.discarded),
        *(depths.outbox, depths.oldest_row, depths.held),
    )
    for family, value in zip(families.values(), values, strict=True):
        family.add_metric((), value)
    yield from (jobs, *families.values())


def describe_consumers(
    consumers: Collection[Measures], positions: Positions | None
) -> Iterator[Metric]:
    """How far this process is in its partitions, and how long it took."""
    lag = _make_gauge(
        "lag", "Offsets up to the ends of the partitions that this process owns."
    )
    highest = _make_gauge(
        "lag_highest", "Those of its partition that is furthest behind."
    )
    held = _make_gauge(
        "gate_partitions", "Partitions whose next record waits for other groups."
    )
    waited = _make_gauge(
        "gate_seconds",
        "For how long one does, and for which group; at most a hundred.",
        *("partition", "after"),
    )
    seconds = CounterMetricFamily(
        f"{PREFIX}consumer_apply_seconds",
        "Seconds in which threads were busy with blocks, failed ones as well.",
        labels=("group", "topic"),
    )
    for one in consumers:
        for topic, busy in one.read_seconds().items():
            seconds.add_metric((one.group, topic), busy)
        waits = one.find_waits()
        for topic in one.gated:
            count = sum(wait.partition[0] == topic for wait in waits)
            held.add_metric((one.group, topic), count)
        for wait in waits[:_MOST_PARTITIONS]:
            topic, number = wait.partition
            waited.add_metric((one.group, topic, str(number), wait.after), wait.seconds)
    for group, topic, found in _find_lags(consumers, positions):
        lag.add_metric((group, topic), found.total)
        highest.add_metric((group, topic), found.highest)
    yield from (lag, highest, held, waited, seconds)


def _find_lags(
    consumers: Collection[Measures], positions: Positions | None
) -> list[tuple[str, str, Lag]]:
    """Group, topic and lag of what is known; the question for the next answer."""
    if positions is None:
        return []
    return [
        (one.group, topic, found)
        for one in consumers
        for topic, found in one.find_lags(positions, _STALE).items()
    ]


def describe_gates(gates: Iterable[JobGate]) -> Metric:
    """For how long jobs of records have waited for other groups."""
    waited = GaugeMetricFamily(
        f"{PREFIX}job_gate_seconds",
        "For how long jobs of a partition's records wait, and for which group; at most "
        "a hundred.",
        labels=("topic", "partition", "after"),
    )
    waits = [one for gate in gates for one in gate.find_waits()]
    for wait in sorted(waits, key=lambda one: -one.seconds)[:_MOST_PARTITIONS]:
        topic, _, number = wait.origin.rpartition("/")
        after = wait.wait.dependency.group
        waited.add_metric((topic, number, after), wait.seconds)
    return waited


def describe_consumed(consumed: Consumed | None) -> Iterator[Metric]:
    """How consumers get on in all processes; nothing if that is not known."""
    age = _make_gauge("applied_age_seconds", "Age of the newest applied record.")
    skipped = _make_gauge(
        "skipped_records", "Records that were skipped; of very many an estimate."
    )
    blocked = _make_gauge(
        "blocked_partitions", "Partitions that stand still at a record."
    )
    offset = _make_gauge(
        "blocked_offset", "Where one stands still; at most a hundred.", "partition"
    )
    seconds = _make_gauge("blocked_seconds", "For how long it does.", "partition")
    if consumed is not None:
        for family, values in (
            (age, consumed.ages),
            (skipped, consumed.skipped),
            (blocked, consumed.blocked),
        ):
            for labels, value in values.items():
                family.add_metric(labels, value)
        for one in consumed.partitions:
            place = (one.group, one.topic, str(one.partition))
            offset.add_metric(place, one.offset)
            if one.seconds is not None:
                seconds.add_metric(place, one.seconds)
    yield from (age, skipped, blocked, offset, seconds)


def _make_gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """A gauge of consumers, by group and topic."""
    return GaugeMetricFamily(
        f"{PREFIX}consumer_{name}", text, labels=("group", "topic", *labels)
    )


def _describe_owned(owned: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}owned_origins", "Origins that this process owns.", labels=("role",)
    )
    for role, count in owned.items():
        family.add_metric((role,), count)
    return family


def _describe_build() -> Metric:
    family = InfoMetricFamily(f"{PREFIX}build", "The release that runs.")
    family.add_metric((), {"version": __version__})
    return family
