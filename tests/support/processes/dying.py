"""Executors that kill themselves at a step of a job's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import exponential, telemetry
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.running.transaction import JobConnections, OwnTransaction
from tests.support.processes import kinds
from tests.support.processes.kinds import kind
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import App, Job

STEPS = [
    "borrow",  # before the transaction begins
    "begun",  # nothing is written yet
    "written",  # the effect is written, and the handler goes on
    "left",  # the handler has left the transaction
    "completion",  # the completion is about to be sent, and the commit behind it
    "committed",  # both are committed, and the handler goes on
    "ran",  # the handler has ended
    "settled",  # the dispatcher knows
]
ENTITIES = "create table entities (key text primary key, n int not null)"
"""The table of the entities that `changes_entities` changes."""

_CHANGE = "update entities set n = n + 1 where key = %s returning n"
_last: list[str] = []
"""The step at which this process dies, if there is one."""


def die(step: str) -> None:
    """Kill the process, if it is at its step."""
    if step in _last:
        say(f"dying: {step}")
        kinds.die()


def before(owner: Any, name: str, step: str) -> None:
    """Die when this method is called."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        die(step)
        return method(*args, **options)

    setattr(owner, name, wrapped)


def listen(event: str, _: dict[str, Any]) -> None:
    """Die when the handler has ended."""
    if event == "job.ran":
        die("ran")


def watch(last: str) -> None:
    """Die at this step, of the handler or of the library."""
    _last.append(last)
    for name, step in (("__enter__", "borrow"), ("__aenter__", "borrow")):
        before(OwnTransaction, name, step)
    for name, step in (("__exit__", "left"), ("__aexit__", "left")):
        before(OwnTransaction, name, step)
    before(JobConnections, "completion", "completion")
    settled = Dispatcher._settled

    def settle(self: Any) -> None:
        some = len(self._settler) > 0
        settled(self)
        if some:
            die("settled")

    Dispatcher._settled = settle  # type: ignore[method-assign]
    telemetry.listen(listen)


@kind("executor")
def dies(app: App, step: str | None = None) -> None:
    """Each job has an effect in its own transaction."""
    if step:
        watch(step)
    retry = exponential(first=0.01, cap=0.01)
    insert = "insert into effects (job, pod) values (%s, %s)"

    @app.job(name="plain", group="group", retry=retry)
    def plain(job: Job, group: str) -> None:
        with job.transaction() as connection:
            die("begun")
            connection.execute(insert, (job.id, app.settings.pod))
            die("written")
        die("committed")

    @app.job(name="async", group="group", retry=retry)
    async def waiting(job: Job, group: str) -> None:
        async with job.transaction() as connection:
            die("begun")
            await connection.execute(insert, (job.id, app.settings.pod))
            die("written")
        die("committed")


@kind("executor")
def changes_entities(app: App, topic: str, step: str | None = None) -> None:
    """Each job changes an entity, and sends a message about it."""
    if step:
        watch(step)
    events = app.topic(topic, value=int)

    @app.job(group="key")
    def change(job: Job, key: str) -> None:
        with job.transaction() as connection:
            die("begun")
            row = connection.execute(_CHANGE, (key,)).fetchone()
            assert row is not None
            die("changed")
            events.send(connection, key=key, value=row[0], version=row[0])
            die("written")
        die("committed")
