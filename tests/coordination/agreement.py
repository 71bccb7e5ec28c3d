"""Compares what the library knows with what the reader written from the page knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs_lib.coordination.world import World
    from tests.coordination.listener import Listener


def compare(world: World, listener: Listener) -> None:
    """Compare what the library and the other reader know."""
    assert world.now_ms == listener.time
    assert world.partitions == listener.n
    assert {
        (*shared,): entry.position for shared, entry in world.entries.items()
    } == listener.positions
    assert {
        (*shared,): (entry.holding[:2], *entry.holding[2:])
        for shared, entry in world.entries.items()
        if entry.holding is not None
    } == {about: tuple(one.values()) for about, one in listener.holders.items()}
    assert {
        group: (pause[0], pause[1:]) for group, pause in world.pauses.items()
    } == listener.pauses
