"""What a table goes through while its consumer is killed again and again."""

from __future__ import annotations

import signal
import uuid
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.consume import peers
from benchmarks.consume.tables import (
    READ_MODEL,
    find_difference,
    judge_writes,
    log_writes,
)
from benchmarks.ownership.pods import wait_until

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.consume.peers import Peer
    from benchmarks.consume.stage import Stage
    from benchmarks.worker import Row

KILLS = 20
_RECORDS = 300_000
_KEYS = 25_000
"""Few, so that a row that goes back in time is a common one."""
_LAST_KILL = 0.9
"""The share of the topic at which the last kill comes."""
_SECONDS = 240.0
_EQUAL_SECONDS = 60.0
_COUNTS = (
    "kills",
    "kills_amid",
    "written_again",
    "gone_back_in_time",
    "keys_gone_back",
)


def measure_kills(bench: Bench, stage: Stage) -> Figures:
    """Kill consumers while they fill a table; count what the table shows of it."""
    kills = bench.size(KILLS)
    chosen = [peers.READ_MODEL]
    chosen += [stage.peers[name] for name in peers.PACKAGED if name in stage.peers]
    rows = {
        peer.name: bench.attempt(peer.name, partial(kill, bench, stage, peer, kills))
        for peer in chosen
    }
    ours = rows.pop("read_model") or {}
    return {
        **{name: ours.get(name) for name in _COUNTS},
        "kills_of_peers": {
            name: {count: row[count] for count in _COUNTS}
            for name, row in rows.items()
            if row is not None
        },
    }


def kill(bench: Bench, stage: Stage, peer: Peer, kills: int) -> Row:
    """Kill a consumer at even steps of its way; it ends with the whole topic.

    Raises:
        WaitError: the table is not equal to the topic in the end.
    """
    topic = stage.topics.fill(bench.size(_RECORDS), bench.size(_KEYS))
    group = f"bench-{uuid.uuid4().hex[:8]}"
    amid = 0
    with stage.prepared(READ_MODEL) as connection:
        log_writes(connection)
        for number in range(1, kills + 2):
            share = _LAST_KILL * number / kills if number <= kills else 1.0
            # The killed one keeps its partitions for as long as its session lasts: all
            # have the same one here.
            with stage.consuming(
                peer, topic, group=group, JOBS_LIB_SESSION_TIMEOUT="6"
            ) as running:
                stage.await_progress(
                    *(running, connection, READ_MODEL, topic),
                    share=share,
                    seconds=_SECONDS,
                    pause=0.005,
                )
                if number <= kills:
                    running.end(signal.SIGKILL)
                    amid += READ_MODEL.progress(connection, topic) < 1.0
                    continue
                equal = partial(
                    find_difference,
                    *(connection, READ_MODEL, topic),
                    deletes=peer.deletes,
                )
                wait_until(
                    lambda: equal() is None,  # noqa: B023 -- called at once
                    _EQUAL_SECONDS,
                    lambda: f"{peer.name} is equal to the topic: {equal()}",  # noqa: B023
                    pause=0.2,
                )
        return {"kills": kills, "kills_amid": amid, **judge_writes(connection)}
