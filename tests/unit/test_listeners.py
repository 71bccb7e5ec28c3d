"""Listeners come and go while events are under way."""

from __future__ import annotations

from jobs_lib import telemetry


def test_a_listener_that_goes_away_hides_the_event_from_no_other_one():
    told: list[str] = []

    def once(event, fields):
        told.append("once")
        stop()

    only = {"block.read"}
    stop = telemetry.listen(once, only)
    others = [telemetry.listen(lambda *_: told.append("other"), only) for _ in range(2)]
    try:
        telemetry.emit("block.read", shard=1, rows=2)
        telemetry.emit("block.read", shard=1, rows=2)
    finally:
        for one in others:
            one()
    assert told == ["once", "other", "other", "other", "other"]
