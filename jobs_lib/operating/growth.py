"""Add partitions to a stream, so that each key keeps its order.

More partitions move keys. So all who publish to the stream stop first, by a row of the
table `streams` (see `jobs_lib/streams/permits.py`). Once no event can be on its way any
more, and the groups that read the stream have handled all that it has, the partitions
are added, and the publishers go on with the new number.

The row is a lease. If this process dies, publishers go on when it is over, with the
partitions that Kafka has then. If any were added, all earlier events were handled.

The row has the number of partitions until a command has ended well. As long as it does,
a publisher may have asked a broker that does not show them all, and keeps to what it
was told. So the next command does everything again: each publisher sees a stop and asks
anew, and what it has sent to old partitions meanwhile is handled before.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg

from jobs_lib.errors import JobsError, OperatingError, UnavailableError
from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.partitions import add_partitions, count_on_brokers
from jobs_lib.kafka.places import count_left, find_places
from jobs_lib.kafka.refusal import missing_topics
from jobs_lib.operating.rewinds import read_places
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.database import Database
from jobs_lib.streams.once import SECONDS_BESIDE
from jobs_lib.streams.permits import GOOD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import datetime

    from jobs_lib.app import App
    from jobs_lib.postgres.session import Session
    from jobs_lib.streams.stream import Stream

SECONDS = 60.0
"""How long publishers are stopped at most, unless the caller says otherwise."""
LEASE = 10.0
"""Seconds after which publishers go on if the command has died."""
_SHOWN_SECONDS = 30.0
"""How long the brokers may take to show the partitions."""
_PAUSE = 0.3
_TELL_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stream whose publishers are stopped now."""

    topic: str
    partitions: int
    """How many it gets."""
    since: datetime
    seconds_left: float
    """When they go on, if the command that stops them is dead."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that must have handled all events."""

    name: str
    stores: bool
    """Whether its offsets are stored in the app's database, and not only in Kafka."""


def grow(
    app: App,
    topic: str,
    partitions: int,
    *,
    groups: Collection[str] = (),
    seconds: float = SECONDS,
    publish_timeout: float | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> float:
    """Add partitions to a stream, while all who publish to it wait.

    Args:
        app: declares the stream.
        topic: the stream, as it is declared or as Kafka has it.
        partitions: how many it will have.
        groups: groups of other apps that read it, by their names in Kafka. Those of
            this app are known.
        seconds: how long publishers are stopped at most, before the partitions are
            added.
        publish_timeout: the longest ``JOBS_LIB_PUBLISH_TIMEOUT`` of the processes that
            publish to it. By default also those that ended long ago count. It is wrong
            if one with a longer time has published last within that time.
        tell: is called with what is waited for, each time that it changes.

    Returns how many seconds they were stopped; 0 if it has grown so far already.

    Raises:
        AccessError: Kafka does not let this client in, or denies it a right.
        OperatingError: it is no stream of this app, it has more partitions, nobody
            knows who reads it, another such command is at work, or the time was too
            short. Publishers go on, and no partition was added, unless it says so.
        TopicError: the topic does not exist, or Kafka refuses to add partitions.
        UnavailableError: Kafka or the database does not answer; likewise.
    """
    stream = _find_stream(app, topic)
    found = list_partitions(app.settings, [stream.name])[stream.name]
    if not found:
        raise missing_topics(app.settings, [stream.name])
    if found > partitions:
        raise OperatingError(
            f"the stream {topic!r} has {found} partitions, and Kafka takes none away: "
            f"give more than {found}"
        )
    if found == partitions and _is_done(app, stream, partitions):
        return 0.0
    waited_for = _find_groups(app, stream, groups)
    _name_others(app, stream, tell)
    with _stopped(app, stream, partitions) as stop:
        stop.has_asked = found == partitions
        if publish_timeout is not None:
            stop.forget_longer(publish_timeout + SECONDS_BESIDE)
        _await_groups(app, stream, stop, waited_for, seconds, tell)
        stop.renew()
        stop.has_asked = True
        add_partitions(app.settings, stream.name, partitions)
        _await_brokers(app, stream, stop, partitions, tell)
        return stop.age


def list_stopped(app: App) -> list[Stopped]:
    """List the streams of an app whose publishers are stopped now.

    Raises:
        UnavailableError: the database does not answer.
    """
    database = Database.of(app.settings)
    names = {"topics": [one.name for one in app.streams.values()]}
    with database.connect("streams") as connection, bounded(connection, database):
        rows = connection.execute(database.queries["list_stopped"], names).fetchall()
    return [Stopped(*row) for row in sorted(rows)]


def explain_growth(app: App, topic: str, partitions: int) -> list[str]:
    """Explain what else there is to do after a stream has grown: a line each."""
    stream = _find_stream(app, topic)
    lines = []
    if stream.partitions != partitions:
        lines.append(f"declare partitions={partitions} for {stream.declared!r}")
    if app.home == stream.name:
        lines.append(
            "the stream is the home topic: groups of jobs stay where they are until "
            f"`jobs-lib topics repartition MODULE:APP {partitions}`"
        )
    for one in app.consumers:
        others = {after.topic for after in one.after} - {one.topic}
        if stream.name in others | {one.topic} and others:
            pair = " and ".join(sorted({one.topic, *others}))
            lines.append(
                f"the group {one.group!r} compares places of {pair}: give these topics "
                "the same number of partitions before a process of it starts again"
            )
    return lines


def _is_done(app: App, stream: Stream[Any], partitions: int) -> bool:
    """Whether the last command ended well, and each broker shows the partitions."""
    database = Database.of(app.settings)
    values = {"topic": stream.name}
    with database.connect("grow") as connection, bounded(connection, database):
        found = connection.execute(database.queries["find_growth"], values)
        if found.rowcount:
            return False
    return _are_shown(count_on_brokers(app.settings, stream.name), partitions)


@contextmanager
def _stopped(app: App, stream: Stream[Any], partitions: int) -> Iterator[_Stop]:
    """Stop the publishers of a stream until the end of the block."""
    database = Database.of(app.settings)
    with (
        database.connect("grow", impatient=True) as connection,
        _Stop(connection, database, stream.name, partitions).held() as stop,
    ):
        yield stop


class _Stop:
    """Stops the publishers of a stream, as long as it is renewed.

    Args:
        connection: to the database.
        database: has the row of the stream.
        topic: the stream, by its name in Kafka.
        partitions: how many it gets.
    """

    def __init__(
        self,
        connection: Session[Any],
        database: Database,
        topic: str,
        partitions: int,
    ) -> None:
        self._connection = connection
        self._queries = database.queries
        self._topic = topic
        self._partitions = partitions
        self._named = {"topic": topic, "grower": uuid4(), "lease": LEASE}
        self._began = 0.0
        self.has_asked = False
        """Whether Kafka was asked for the partitions: then they may be there."""

    @property
    def age(self) -> float:
        """Seconds since publishers were stopped."""
        return time.monotonic() - self._began

    @contextmanager
    def held(self) -> Iterator[_Stop]:
        """Stop them until the end of the block."""
        self._take()
        has_ended = False
        try:
            yield self
            has_ended = True
        finally:
            # If that fails, they go on when the lease is over.
            with suppress(psycopg.Error, JobsError):
                self._execute("open_stream", has_ended=has_ended)

    def renew(self) -> float:
        """Go on; returns how long an event may be on its way.

        Raises:
            OperatingError: the lease is over, and publishers go on already.
            UnavailableError: the database does not answer.
        """
        asked_at = time.monotonic()
        row = self._execute("renew_stop").fetchone()
        # An answer that comes late says nothing of now.
        if row is None or time.monotonic() > asked_at + LEASE / 2:
            raise OperatingError(
                f"this command stood still for too long, or a clock was set, so those "
                f"who publish to {self._topic!r} go on. {self.tell_rest()}"
            )
        return float(row[0])

    def forget_longer(self, seconds: float) -> None:
        """Forget those whose events may be on their way for longer.

        A process that goes on notes its time again before its next event.

        Raises:
            UnavailableError: the database does not answer.
        """
        self._execute("lower_send_seconds", seconds=seconds)

    def tell_rest(self) -> str:
        """Tell what became of the partitions."""
        if not self.has_asked:
            return "No partition was added: try again"
        return (
            f"Kafka was asked for {self._partitions} partitions before, and not all "
            "brokers may show them yet: call it again, or keys may lose their order"
        )

    def _take(self) -> None:
        row = self._execute(
            "stop_stream", partitions=self._partitions, seconds=0.0
        ).fetchone()
        self._began = time.monotonic()
        if row is None:
            raise OperatingError(
                f"another command adds partitions to {self._topic!r} already: see "
                "`jobs-lib topics status MODULE:APP`. If it is dead, its time is over "
                f"in {LEASE:g} s"
            )

    def _execute(self, query: str, **values: Any) -> psycopg.Cursor[Any]:
        try:
            return self._connection.execute(
                self._queries[query], {**self._named, **values}
            )
        except psycopg.errors.InsufficientPrivilege as error:
            raise OperatingError(
                f"{self._connection.info.user} may not do this "
                f"({error.diag.message_primary}): connect as a role of a service, or "
                "see `jobs-lib grants -h`"
            ) from None
        except psycopg.OperationalError as error:
            raise UnavailableError(
                f"the database does not answer: {str(error).strip()}. Those who "
                f"publish to {self._topic!r} go on within {LEASE:g} s. "
                f"{self.tell_rest()}"
            ) from None


def _await_groups(
    app: App,
    stream: Stream[Any],
    stop: _Stop,
    groups: Sequence[_Group],
    seconds: float,
    tell: Callable[[str], object],
) -> None:
    """Wait until no event is on its way, and the groups have handled all."""
    # Who has begun to ask before the stop may publish until then.
    settled = GOOD_SECONDS + stop.renew()
    if seconds <= settled:
        raise OperatingError(
            f"an event may be on its way for {settled:g} s after publishers are "
            f"stopped (the longest JOBS_LIB_PUBLISH_TIMEOUT that a process has ever "
            f"had, and some more), and they shall be stopped for {seconds:g} s at "
            "most: give more than that. If no process has so long a time any more, "
            "say which is the longest now, by --publish-timeout"
        )
    told, told_at = "", float("-inf")
    while True:
        if stop.age < settled:
            waits = [f"events on their way, for {settled:g} s"]
        else:
            waits = list(_list_behind(app, stream, stop, groups))
            if not waits:
                return
        text = "; ".join(waits)
        if text != told and stop.age > told_at + _TELL_PAUSE:
            told, told_at = text, stop.age
            tell(f"waiting for {text}")
        if stop.age > seconds:
            raise OperatingError(
                f"after {seconds:g} s {stream.name!r} still waits for {text}: those "
                "who publish go on. Repair or wait for these groups, or give more "
                f"time. {stop.tell_rest()}"
            )
        time.sleep(_PAUSE)
        settled = GOOD_SECONDS + stop.renew()


def _list_behind(
    app: App, stream: Stream[Any], stop: _Stop, groups: Sequence[_Group]
) -> Iterator[str]:
    """Describe how far groups are behind the ends that the partitions have now."""
    database = Database.of(app.settings)
    ends = find_places(app.settings, stream.name, "end")
    for group in groups:
        # Kafka may be slow.
        stop.renew()
        stored = None
        if group.stores:
            stored = read_places(database, group.name, stream.name)
        if left := count_left(app.settings, group.name, stream.name, stored, ends):
            yield f"the group {group.name!r}, which is {left} offsets behind"


def _await_brokers(
    app: App,
    stream: Stream[Any],
    stop: _Stop,
    partitions: int,
    tell: Callable[[str], object],
) -> None:
    """Wait until each broker shows the partitions: a publisher may ask any of them."""
    tell("waiting for the brokers to show the partitions")
    until = time.monotonic() + _SHOWN_SECONDS
    while True:
        # Each broker may be slow, and so may the one be that has added them.
        stop.renew()
        counts = count_on_brokers(app.settings, stream.name, stop.renew)
        if _are_shown(counts, partitions):
            return
        if time.monotonic() > until:
            raise UnavailableError(
                f"not all brokers show {partitions} partitions of {stream.name!r} "
                f"within {_SHOWN_SECONDS:g} s, and nobody knows whether they come: "
                + ", ".join(f"{one} shows {count}" for one, count in counts.items())
                + ". Those who publish go on. Look at the brokers, and call it again, "
                "or keys may lose their order"
            )
        time.sleep(_PAUSE)


def _are_shown(counts: Mapping[str, int], partitions: int) -> bool:
    """Whether each broker shows the partitions."""
    return min(counts.values()) >= partitions


def _find_stream(app: App, topic: str) -> Stream[Any]:
    for one in app.streams.values():
        if topic in (one.declared, one.name):
            return one
    if any(topic in (one.declared, one.name) for one in app.topics.values()):
        raise OperatingError(
            f"the topic {topic!r} is written by the outbox, whose rows wait for no "
            "publisher: stop the relays, wait until its groups have read all, add "
            "partitions with Kafka's own tools, and start the relays again"
        )
    known = ", ".join(sorted(app.streams)) or "none"
    raise OperatingError(
        f"this app declares no stream {topic!r}; its streams are: {known}"
    )


def _find_groups(
    app: App, stream: Stream[Any], others: Collection[str]
) -> list[_Group]:
    """Find the groups that read a stream."""
    own = [one for one in app.consumers if one.topic == stream.name]
    groups = {one.group: _Group(one.group, stores=True) for one in own}
    # Kafka alone knows how far these are.
    transactional = [
        one.group for one in app.transactionals if one.topic == stream.name
    ]
    done = [one.done_group for one in own if one.done]
    for name in (*done, *transactional, *others):
        groups.setdefault(name, _Group(name, stores=False))
    if not groups:
        raise OperatingError(
            f"this app has no consumer or read model of {stream.name!r}, and no other "
            "group is named: give each group that reads it by --group, so that it has "
            "handled a key's events before the key moves"
        )
    return [groups[name] for name in sorted(groups)]


def _name_others(app: App, stream: Stream[Any], tell: Callable[[str], object]) -> None:
    """Name the functions whose events nobody stops: Kafka alone knows of them."""
    if app.transactionals:
        groups = ", ".join(sorted(repr(one.group) for one in app.transactionals))
        tell(
            f"not stopping what @app.transactional sends, for the groups {groups}: if "
            f"one of them sends to {stream.name!r}, stop its processes first, or keys "
            "may lose their order"
        )
