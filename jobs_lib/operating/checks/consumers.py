"""Check the consumers: partitions that stand still, and records that were skipped."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from jobs_lib.kafka.shared_groups import APART, find_shared
from jobs_lib.operating.checks.finding import Finding
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from jobs_lib.operating.checks.finding import Target

_COUNTED = 10_000


def check_stopped(target: Target) -> Iterator[Finding]:
    """Check that no partition of a consumer stands still at a record."""
    for group, topic, partition, offset, error, since in target.rows("check_stopped"):
        # Where records are gone, the error itself says at which offset to go on.
        way_out = "as it says"
        if "next_offset" not in error:
            way_out = (
                "repair the cause, and it goes on by itself; or pass the record over: "
                f"update {quote(target.database.schema)}.offsets set next_offset = "
                f"{offset + 1} where consumer_group = {_literal(group)} and topic = "
                f"{_literal(topic)} and partition = {partition}"
            )
        yield Finding(
            "error",
            "stopped partitions",
            f"{topic}/{partition} of the group {group!r} stands still at offset "
            f"{offset} since {_tell(since)}: {error}",
            way_out,
        )


def check_skipped(target: Target) -> Iterator[Finding]:
    """Check that consumers have skipped no record."""
    for group, topic, partition, count, first, error, since in target.rows(
        "check_skipped", counted=_COUNTED
    ):
        number = f"{count:,}" + (" or more" if count >= _COUNTED else "")
        yield Finding(
            "warn",
            "skipped records",
            f"{number} skipped in {topic}/{partition} of the group {group!r} since "
            f"{_tell(since)}, the first at offset {first}: {error}",
            "repair the cause, then `jobs-lib readmodel replay MODULE:APP "
            f"{shlex.quote(topic)} --group {shlex.quote(group)}`; or give them up: "
            "delete from "
            f"{quote(target.database.schema)}.skipped where consumer_group = "
            f"{_literal(group)} and topic = {_literal(topic)} and partition = "
            f"{partition}",
        )


def check_shared(target: Target) -> Iterator[Finding]:
    """Check that no service of another database reads in one of the groups."""
    settings = target.settings
    if not settings.kafka_bootstrap_servers:
        return
    read: dict[str, set[str]] = {}
    for group, topic in target.rows("check_consumed"):
        read.setdefault(group, set()).add(topic)
    ((installation, *_),) = target.rows("read_installation")

    def find_pods() -> set[str]:
        return {pod for (pod,) in target.rows("read_pods")}

    for found in find_shared(settings, installation, read, find_pods):
        yield Finding("error", "shared groups", str(found), APART)


def _literal(text: str) -> str:
    """The text as SQL writes it, for people to copy."""
    return "'" + text.replace("'", "''") + "'"


def _tell(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
