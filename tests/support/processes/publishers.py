"""Processes that publish to a stream, and may die at a step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.operating import growth
from jobs_lib.streams.publisher import Publisher
from jobs_lib.streams.requests import Requests
from jobs_lib.streams.stream import Stream
from tests.support.processes.kinds import die, kind
from tests.support.say import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import App

MAY_PUBLISH = "create table may_publish ()"
"""Once there is this table, all processes publish at once."""
SET_BACK = (
    "update jobs_lib.requests set record_offset = null,"
    " sent_until = clock_timestamp() + interval '1 hour'"
)
"""As if all senders had died, and then the database's clock were set back."""
STEPS = [
    "remembered",  # the request is in the table, and its event not sent
    "sent",  # the client has the event, and Kafka perhaps
    "acknowledged",  # Kafka has the event, and its place is not noted
    "noted",  # the place is noted, and nobody was answered
]
CALLS: dict[str, tuple[type, str, bool]] = {
    "remembered": (Publisher, "send", False),
    "sent": (Publisher, "send", True),
    "acknowledged": (Requests, "answer", False),
    "noted": (Stream, "answer", False),
}
"""By step, a method and whether it is over by then."""


@kind(publish_timeout=2)
def publisher(
    app: App,
    topic: str,
    key: str,
    value: Any,
    request: str,
    calls: int = 1,
    step: str | None = None,
) -> None:
    """Publish the same event by several calls at once."""
    stream = app.stream(topic)
    # Connect before: then all calls begin at the same time.
    stream.publish("warm", {})
    if step:
        die_around(*CALLS[step])
    say("ready")
    await_start(app.settings.database_url)

    def publish(_: int) -> None:
        found = stream.publish(key, value, request=request)
        say(f"answer {found.partition} {found.offset} {found.content}")

    with ThreadPoolExecutor(calls) as pool:
        list(pool.map(publish, range(calls)))
    say("done")
    threading.Event().wait()


GROWTH_STEPS = {
    "stopped": ("_await_groups", False),  # publishers are stopped
    "handled": ("add_partitions", False),  # the groups have handled all
    "added": ("add_partitions", True),  # Kafka has the partitions
    "shown": ("_await_brokers", True),  # all brokers show them
}
"""By step of `topics grow`, a function and whether it is over by then."""


@kind()
def grower(app: App, topic: str, group: str, partitions: int, step: str) -> None:
    """Add partitions to a stream, and die at a step."""
    app.stream(topic)
    app.consumer(topic, group=group)(lambda record, conn: None)
    die_around(growth, *GROWTH_STEPS[step])
    growth.grow(app, topic, partitions)


def await_start(url: str) -> None:
    """Wait until the test lets all processes publish."""
    with psycopg.connect(url, autocommit=True) as connection:
        ask = "select to_regclass('may_publish') is not null"
        while connection.execute(ask).fetchone() != (True,):
            threading.Event().wait(0.01)


def die_around(owner: object, name: str, is_over: bool) -> None:
    """Kill this process before or after the next call of a method or function."""
    method: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if is_over:
            method(*args, **options)
        say(f"dying around {name}")
        die()

    setattr(owner, name, wrapped)
