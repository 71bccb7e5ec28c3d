"""Find where a change is: from its table through outbox and topic to its consumers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jobs_lib.errors import OperatingError
from jobs_lib.kafka.newest import SECONDS, Newest, find_newest
from jobs_lib.operating.session import find_patience
from jobs_lib.operating.where_facts import (
    KeyPlace,
    Unknown,
    attempt,
    read_consumers,
    read_outbox,
    read_source,
)
from jobs_lib.operating.where_places import Facts, Place, judge
from jobs_lib.postgres.database import Database
from jobs_lib.reasons import count_bytes
from jobs_lib.settings import require_bootstrap_servers

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from jobs_lib.app import App

_AGAIN_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Where:
    """Where the newest change of a key is."""

    topic: str
    """By its name in Kafka."""
    key: str
    places: list[Place] = field(default_factory=list)
    """In the order in which a change passes them."""
    has_arrived: bool = False
    verdict: str = ""
    """The first place that it has not passed, and why, as a sentence."""


def where(
    app: App,
    topic: str,
    key: str,
    *,
    seconds: float = SECONDS,
    partition: int | None = None,
) -> Where:
    """Find where the newest change of a key is, and what it waits for.

    A server that does not answer leaves only its own places unknown.

    Args:
        app: declares the topic, its entity, and its consumers.
        topic: as it is declared, or by its name in Kafka.
        key: the text of the record's key.
        seconds: how long to read the topic for the key, backwards from its end.
        partition: where the key is; by default where this library's producers and
            Java's put it.

    Raises:
        ConfigurationError: no database or no broker is set.
        OperatingError: the app does not know the topic, or no record has such a key.
    """
    name = _find_topic(app, topic)
    _check_key(key)
    require_bootstrap_servers(app.settings)
    facts = _read(app, name, key, seconds, partition)
    places, verdict = judge(facts)
    is_lost = places[0].state == "stuck" or (
        facts.is_hidden and not verdict.has_arrived
    )
    if is_lost and facts.sources:
        # A record is seen a moment later than its row has left the outbox, and a
        # transaction is open for a moment.
        time.sleep(_AGAIN_SECONDS)
        facts = _read(app, name, key, seconds, partition)
        places, verdict = judge(facts)
    return Where(name, key, places, verdict.has_arrived, verdict.text)


def _find_topic(app: App, topic: str) -> str:
    """Find the name in Kafka of a topic that the app declares or reads."""
    for one in app.written:
        if topic in (one.declared, one.name):
            return one.name
    for consumer in app.consumers:
        if consumer.is_called(topic):
            return consumer.topic
    known = {one.name for one in app.written}
    known |= {one.topic for one in app.consumers}
    raise OperatingError(
        f"the app {app.name!r} neither declares nor reads a topic {topic!r}; it knows: "
        f"{', '.join(sorted(known)) or 'none'}"
    )


def _check_key(key: str) -> None:
    if count_bytes(key) < 1 or "\0" in key:
        raise OperatingError(
            "no record has this key: give at least one byte of UTF-8, without NUL"
        )


def _read(
    app: App, topic: str, key: str, seconds: float, partition: int | None
) -> Facts:
    """Read all places in the order of the flow, so that no change slips past."""
    database = Database.of(app.settings)
    stale_after = app.settings.stale_after
    consumers = [one for one in app.consumers if one.topic == topic]
    facts = Facts(topic, key)
    facts.consumers = [
        (one.group, one.model.name if one.model else None) for one in consumers
    ]
    with ExitStack() as opened:
        patience = find_patience(database)
        connection = attempt(
            lambda: opened.enter_context(
                database.connect("where", answer_within=patience)
            )
        )

        def ask(read: Callable[[psycopg.Connection[Any]], T]) -> T | Unknown:
            # One attempt to connect is enough: a dead server may take its time.
            if isinstance(connection, Unknown):
                return connection
            return attempt(lambda: read(connection))

        for entity in app.entities.values():
            if entity.topic.name == topic:
                read = partial(read_source, database=database, entity=entity, key=key)
                facts.sources[entity.source] = ask(read)
        if any(one.name == topic for one in app.topics.values()):
            facts.outbox = ask(
                lambda conn: read_outbox(conn, database, topic, key, stale_after)
            )
        facts.newest = attempt(
            lambda: find_newest(
                app.settings, topic, key, seconds=seconds, partition=partition
            )
        )
        newest = facts.newest
        place = KeyPlace(topic, partition, key, None, None)
        if isinstance(newest, Newest):
            found = newest.partition, key, facts.offset, newest.topic_id
            place = KeyPlace(topic, *found)
        facts.readers = ask(
            lambda conn: read_consumers(conn, database, consumers, place, stale_after)
        )
    return facts
