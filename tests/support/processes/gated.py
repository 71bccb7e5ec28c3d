"""A consumer that waits for another group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
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
