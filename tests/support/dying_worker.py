"""An executor in a process of its own that kills itself at a step of a transaction."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from jobs_lib import exponential, telemetry
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.running.transaction import JobConnections, OwnTransaction
from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job

STEPS = [
    "borrow",  # before the transaction begins
    "begun",  # nothing is written yet
    "written",  # the effect is, the handler goes on
    "left",  # the handler is done with the transaction
    "completion",  # it is about to be sent, and the commit behind it
    "committed",  # both are in, and the handler goes on
    "ran",  # the handler has ended
    "settled",  # the dispatcher knows
]
_last: list[str] = []
"""The step of this process, if it is to die at one."""


def die(step: str) -> None:
    """Kill the process, if this is its step."""
    if step in _last:
        say(f"dying: {step}")
        os.kill(os.getpid(), signal.SIGKILL)


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
    """Die at this step, be it a handler's or the library's."""
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


def main() -> NoReturn:
    """Run until the step comes, or for ever."""
    url, pod, last = sys.argv[1:]
    watch(last)
    app = make_app(url, pod=pod)
    insert = "insert into effects (job, pod) values (%s, %s)"

    @app.job(name="plain", group="group", retry=exponential(first=0.01, cap=0.01))
    def plain(job: Job, group: str) -> None:
        with job.transaction() as connection:
            die("begun")
            connection.execute(insert, (job.id, pod))
            die("written")
        die("committed")

    @app.job(name="async", group="group", retry=exponential(first=0.01, cap=0.01))
    async def waiting(job: Job, group: str) -> None:
        async with job.transaction() as connection:
            die("begun")
            await connection.execute(insert, (job.id, pod))
            die("written")
        die("committed")

    sys.exit(Service(app, ["executor"]).run())


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
