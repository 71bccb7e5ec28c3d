"""Read and check what is asked of re-exports, for commands and for the web app."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from jobs_lib import reexport as api
from jobs_lib.errors import ReexportError
from jobs_lib.kafka.lag import find_readers
from jobs_lib.kafka.places import read_committed
from jobs_lib.reexport.control import REACHED, check_rate, read_unfinished

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.kafka.lag import Readers
    from jobs_lib.outbox.topic import Entity, Topic


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """A plan, with the time that it takes and who reads the topic."""

    entity: Entity
    topic: str
    """Where the states are to go, by its name in Kafka."""
    ranges: tuple[api.Range, ...]
    keys: str
    """Where the keys are, and their types."""
    rate: int
    begins: datetime
    window: api.Span | None
    readers: Readers | None

    @property
    def total(self) -> int:
        """The number of all keys; an estimate if a sample cut the ranges."""
        return sum(piece.keys for piece in self.ranges)

    @property
    def minutes(self) -> float:
        """How long it takes."""
        return self.total / (self.rate * REACHED)

    @property
    def ends(self) -> datetime:
        """When it ends."""
        return self.begins + timedelta(minutes=self.minutes)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        groups = None if self.readers is None else self.readers.groups
        return {
            "entity": self.entity.name,
            "topic": self.topic,
            "rate": self.rate,
            "total": self.total,
            "begins": self.begins.isoformat(),
            "eta": self.ends.isoformat(),
            "ranges": [dataclasses.asdict(piece) for piece in self.ranges],
            "groups": None if groups is None else [one._asdict() for one in groups],
        }


def look_ahead(
    app: App,
    entity: Entity,
    rate: int | api.Window,
    ranges: int | None,
    states: tuple[api.Range, ...] | None = None,
    topic: Topic[Any] | None = None,
) -> Outlook:
    """Plan a re-export, and change nothing.

    Args:
        app: declares the entity.
        entity: what ``@app.entity`` declared.
        rate: records a minute, or the hours of the day.
        ranges: the number of ranges of its table.
        states: the ranges of a DataFrame that was examined, instead of the table.
        topic: where the states are to go. Defaults to the entity's own topic.

    Raises:
        ReexportError: it cannot be planned as asked.
    """
    goal = (topic or entity.topic).name
    columns = ", ".join(entity.columns)
    if states is None:
        database = app.database()
        with database.connect("re-export plan") as connection:
            plan = api.plan_ranges(connection, database.queries, entity, ranges)
        states = plan.ranges
        keys = f"{entity.source}.{columns} ({', '.join(plan.source.types)})"
    else:
        keys = f"the DataFrame ({columns})"
    total = sum(piece.keys for piece in states)
    begins, window = datetime.now(UTC), None
    if not isinstance(rate, int):
        window = api.find_span(rate)
        begins, rate = window.begin, api.find_rate(total, window)
    readers = None
    if app.settings.kafka_bootstrap_servers:
        readers = find_readers(app.settings, goal)
    return Outlook(entity, goal, states, keys, rate, begins, window, readers)


def choose_rate(
    rate: int | None, window: str | None, tz: str | None
) -> int | api.Window:
    """Return the rate or the window that is given.

    Raises:
        ReexportError: there is neither, or both, or it is out of range.
    """
    if (rate is None) == (window is None):
        raise ReexportError(
            "say how fast it is: either --rate, in records a minute, or --window, such "
            "as 22:00-06:00"
        )
    if rate is not None:
        return check_rate(rate)
    assert window is not None
    return api.parse_window(window, tz)


def find_open_topic(app: App, entity: Entity) -> str:
    """Find the topic that the entity's open re-export goes to, else its own one."""
    database = app.database()
    with database.connect("re-export") as connection:
        found = read_unfinished(connection, database.queries, entity.name)
    return entity.topic.name if found is None else found.topic


def find_limit(app: App, topic: str, text: str) -> api.LagLimit:
    """Parse a limit, and refuse a group that does not read the topic.

    Args:
        app: knows where Kafka is.
        topic: the one that the re-export goes to, by its name in Kafka.
        text: the limit, such as ``search:10000``.

    Raises:
        ReexportError: it is no limit, or the group has committed nothing there.
    """
    limit = api.parse_lag_limit(text)
    if not read_committed(app.settings, limit.group, topic):
        known = [one.group for one in find_readers(app.settings, topic).groups]
        raise ReexportError(
            f"the group {limit.group!r} has committed no offset of {topic!r}, so its "
            f"lag says nothing (groups that have: {', '.join(known) or 'none'}): give "
            "one of these"
        )
    return limit
