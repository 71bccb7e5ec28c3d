"""Which record a job comes from, and whether the gate of its type can judge it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jobs_lib.kafka.dependencies import Dependency


class Source(NamedTuple):
    """The partition of the record that a job comes from, and who has read it."""

    group: str
    """The consumer group whose handler has enqueued the job."""
    topic: str
    partition: int


if TYPE_CHECKING:
    ExplainCircle = Callable[[Collection[Dependency], Source], str | None]
    """Says how jobs of a source would wait for themselves; None if they would not."""


def find_fault(
    after: Collection[Dependency],
    source: Source | None,
    explain_circle: ExplainCircle | None,
) -> str | None:
    """Say why a gate cannot judge a job; None if it can.

    Args:
        after: what the type of the job waits for.
        source: where the job comes from; None if that is not known.
        explain_circle: knows what else waits; None if that is not known.
    """
    topics = sorted({one.topic for one in after})
    if source is None:
        return f"it comes from no record of {' or '.join(map(repr, topics))}"
    if source.topic not in topics:
        return (
            f"it comes from a record of {source.topic!r}, and waits for groups that "
            f"read {' or '.join(map(repr, topics))}"
        )
    circle = f"it comes from a record that {source.group!r} has read, and would wait"
    for topic, group in after:
        if topic == source.topic and group == f"{source.group}.done":
            return (
                f"{circle} for itself: {group!r} passes that record when the job is "
                "done"
            )
    if explain_circle and (way := explain_circle(after, source)):
        return (
            f"{circle} for itself: {way}, and that one passes the record when the job "
            "is done"
        )
    return None
