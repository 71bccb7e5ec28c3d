"""A consumer, and jobs, that wait for another group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.executor.limiting.gate import JobGate
from tests.support.processes.kinds import kind
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import App


@kind("consumers", gate_refresh=0.05)
def gated(app: App, topic: str, after: str) -> None:
    """Say which record is handled, and when a question to Kafka has failed."""

    def tell(_: str, fields: dict[str, Any]) -> None:
        if fields["loop"] == "positions":
            say("failed")

    telemetry.listen(tell, only=["loop.failed"])

    @app.consumer(topic, group=f"{topic}-gated", after=[(topic, after)])
    def handle(record: Any, connection: Any) -> None:
        say(f"handled {record.offset}")


@kind("executor", gate_refresh=0.05)
def gated_jobs(app: App, topic: str, after: str) -> None:
    """Say which job runs, and which offset jobs wait for."""

    @app.job(name="work", group="key", after=[(topic, after)])
    def work(job: Any, key: str) -> None:
        say("ran")

    note = JobGate.note_waiting

    def tell(self: JobGate, origin: str, number: int, offset: int) -> None:
        note(self, origin, number, offset)
        say(f"waits {offset}")

    JobGate.note_waiting = tell  # type: ignore[method-assign]
