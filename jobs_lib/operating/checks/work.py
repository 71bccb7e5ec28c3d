"""Check the work: groups that are stuck, and origins without a live owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding, names
from jobs_lib.partitioner import choose_origin, choose_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target

_HEADS = 1_000
_COUNTED = 10_000
_SAMPLE = 1_000
_EACH = 20


def check_groups(target: Target) -> Iterator[Finding]:
    """Check that no group waits behind a job that fails again and again."""
    for group, origin, job, attempt, error, behind in target.rows(
        "check_blocked", heads=_HEADS, counted=_COUNTED, behind=target.limits.behind
    ):
        count = f"{behind:,}" + (" or more" if behind >= _COUNTED else "")
        yield Finding(
            "warn",
            "blocked groups",
            f"{count} jobs of group {group!r} in {origin} wait behind job {job}, which "
            f"has failed {attempt} times: {error}",
            f"repair the cause, or jobs-lib jobs cancel {job}",
        )


def check_owners(target: Target) -> Iterator[Finding]:
    """Check that every origin with jobs has a live owner."""
    rows = target.rows("check_owners", stale_after=target.settings.stale_after)
    undeclared = [origin for origin, declared, _ in rows if not declared]
    if undeclared:
        yield Finding(
            "error",
            "owners",
            f"jobs wait in origins of topics that nobody declared: {names(undeclared)}",
            "jobs-lib topics declare MODULE:APP TOPIC",
        )
    alone = [origin for origin, declared, owned in rows if declared and not owned]
    if alone:
        yield Finding(
            "error",
            "owners",
            f"jobs wait in origins without a live owner: {names(alone)}",
            "start an executor of the service that reads the topic; jobs-lib owners "
            "shows who owns what",
        )


def check_types(target: Target) -> Iterator[Finding]:
    """Check that a live executor knows the type of each waiting job and may run it."""
    for type_, nobody, another in target.rows(
        "check_types", stale_after=target.settings.stale_after, each=_SAMPLE
    ):
        if nobody:
            yield Finding(
                "error",
                "types",
                f"jobs of type {type_} wait in {names(nobody)}, and no executor that "
                "is alive knows the type",
                f"start an executor of the application that declares {type_}, or "
                "cancel the jobs",
            )
        elif another:
            yield Finding(
                "error",
                "types",
                f"jobs of type {type_} wait in {names(another)}, whose owner does not "
                "know the type; another executor does",
                "finish the deployment, or give each app a name of its own (App)",
            )


def check_placement(target: Target) -> Iterator[Finding]:
    """Check that groups are in their origins, and keys in their shards."""
    configured = target.settings.kafka.get("partitioner")
    if configured not in (None, "murmur2_random"):
        yield Finding(
            "error",
            "partitioner",
            f"JOBS_LIB_KAFKA sets partitioner={configured}: records would lie in other "
            "partitions than their jobs",
            "remove it: jobs_lib sets murmur2_random",
        )
    strays = [
        f"{group} in {origin}"
        for group, origin, topic, count in target.rows("check_groups", each=_EACH)
        if origin != choose_origin(group, topic, count)
    ]
    if strays:
        yield Finding(
            "warn",
            "partitioner",
            f"{len(strays)} of the sampled groups lie in other origins than murmur2 "
            f"gives: {names(strays)}",
            "was an origin given by hand, or the count of partitions changed? Such a "
            "group may run in two origins at once",
        )
    astray = [
        f"{topic} {key}"
        for topic, key, shard, shards in target.rows("check_shards", rows=_SAMPLE)
        if shard != choose_shard(topic, key, shards)
    ]
    if astray:
        yield Finding(
            "error",
            "partitioner",
            f"{len(astray)} of the sampled outbox rows lie in other shards than "
            f"SHA-256 of topic and key gives: {names(astray)}",
            "write them with topic.send(): their keys' order is not kept",
        )
