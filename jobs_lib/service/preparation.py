"""What a service checks, declares and reads before any of its parts starts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from jobs_lib import telemetry
from jobs_lib.consuming import versions
from jobs_lib.consuming.table_faults import find_tables
from jobs_lib.coordination.log_topic import check_log
from jobs_lib.errors import AccessError, ConfigurationError, UnavailableError
from jobs_lib.kafka.access import Needs, check_access
from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.refusal import MISSING, missing_topics
from jobs_lib.kafka.shared_groups import APART, find_shared
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    import psycopg

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.dependencies import Dependency
    from jobs_lib.postgres.database import Database

PARTS = ("consumers", "executor", "relay")
ALL_ORIGINS = "all"
"""The setting ``origins`` of an executor that owns every origin."""
_NEEDS = {
    "consumers": "consumer or read model (`@app.consumer`, `@app.read_model`)",
    "executor": "job type (`@app.job`)",
    "relay": "topic (`app.topic`)",
}


def check_parts(app: App, parts: Collection[str]) -> None:
    """Refuse a service that would have nothing to do.

    Args:
        app: the app to run.
        parts: of the service.

    Raises:
        ConfigurationError: none of the parts has anything to do, or there is no such
            part, or the settings name workers that no job type has.
    """
    if unknown := sorted({*parts} - {*PARTS}):
        raise ConfigurationError(
            f"a service has no {', '.join(unknown)}: its parts are {', '.join(PARTS)}"
        )
    named = {job.workers.name for job in app.jobs.values() if job.workers}
    if unknown := sorted(app.settings.own_workers.keys() - named):
        raise ConfigurationError(
            f"JOBS_LIB_OWN_WORKERS names {', '.join(unknown)}, and no job type has "
            f"such workers: there are {', '.join(sorted(named)) or 'none'}"
        )
    declared = {
        "consumers": [*app.consumers, *app.transactionals],
        "executor": app.jobs,
        "relay": app.topics,
    }
    if any(declared[part] for part in parts):
        return
    asked = [part for part in PARTS if part in parts]
    lacking = " and no ".join(_NEEDS[part] for part in asked)
    raise ConfigurationError(
        f"the app {app.name!r} declares no {lacking or 'part to run'}, so there is "
        f"nothing to do for {' and '.join(asked) or 'a service'}. Is it the right "
        "MODULE:APP, and does its module import the modules that declare the parts?"
    )


def can_reach_kafka(app: App, parts: Collection[str], *, sidecar: bool) -> bool:
    """Whether Kafka answers; refuse now a start that Kafka would keep refusing.

    Args:
        app: the app to run.
        parts: of the service.
        sidecar: whether the executor follows consumers of another process.

    Raises:
        AccessError: Kafka does not let this service in, or denies it a right.
        ConfigurationError: job types wait for groups, and no Kafka is set.
    """
    settings = app.settings
    if not settings.kafka_bootstrap_servers:
        _refuse_gates(app, parts)
        return False
    consumers = app.consumers if "consumers" in parts else []
    transactional = app.transactionals if "consumers" in parts else []
    over_log = coordinates(app, parts)
    followed = job_consumers(app) if sidecar and not over_log else []
    after = find_dependencies(app, parts)
    log = {settings.coordination_topic} if over_log else set()
    needs = Needs(
        reads={one.topic for one in consumers}
        | {one.topic for one in transactional}
        | log,
        measures={one.topic for one in after},
        joins={one.group for one in consumers}
        | {one.group for one in transactional}
        | {one.done_group for one in consumers if one.done},
        writes=log
        | ({one.name for one in app.topics.values()} if "relay" in parts else set()),
        follows={one.group for one in followed} | {one.group for one in after},
    )
    try:
        check_access(settings, needs)
    except AccessError:
        raise
    except UnavailableError as error:
        telemetry.emit("loop.failed", loop="start", error=error)
        return False
    return True


def coordinates(app: App, parts: Collection[str]) -> bool:
    """Whether these parts share what they own over the coordination log."""
    return app.settings.ownership == "coordination" and bool(
        ("consumers" in parts and app.consumers)
        or ("executor" in parts and app.jobs and not app.settings.origins)
        or ("relay" in parts and app.topics)
    )


def check_coordination(app: App, parts: Collection[str]) -> None:
    """Refuse a start whose coordination log is missing, or would lose records.

    Raises:
        AccessError: Kafka does not let this service in, or denies it a right.
        ConfigurationError: it is, or no Kafka is set.
        UnavailableError: no broker answers.
    """
    if coordinates(app, parts):
        settings = app.settings
        check_log(settings, settings.coordination_topic, settings.coordination_interval)


def find_dependencies(app: App, parts: Collection[str]) -> set[Dependency]:
    """Find the groups that consumers and job types wait for in these parts."""
    consumers = app.consumers if "consumers" in parts else []
    jobs = app.jobs.values() if "executor" in parts else []
    found = {one for declared in consumers for one in declared.dependencies}
    return found | {one for job_type in jobs for one in job_type.after}


def find_placed(app: App) -> set[str]:
    """Find the topics of which jobs keep the places of their records for a gate."""
    return {one.topic for job_type in app.jobs.values() for one in job_type.after}


def _refuse_gates(app: App, parts: Collection[str]) -> None:
    for job_type in app.jobs.values() if "executor" in parts else ():
        if job_type.after:
            raise ConfigurationError(
                f"jobs of {job_type.name!r} wait for other groups (`after`), and "
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS names no Kafka that could say how "
                "far those are: set it"
            )


def warn_of_missing_topics(app: App, parts: Collection[str]) -> None:
    """Name all missing topics in one line; each part discovers its own later."""
    consumers = app.consumers if "consumers" in parts else []
    written = app.topics.values() if "relay" in parts else []
    topics = {one.topic for one in consumers} | {topic.name for topic in written}
    if "consumers" in parts:
        topics |= {one.topic for one in app.transactionals}
    topics |= {one.topic for one in find_dependencies(app, parts)}
    # From here on each part copes by itself if Kafka has gone away meanwhile.
    with contextlib.suppress(UnavailableError):
        found = list_partitions(app.settings, topics)
        if missing := sorted(name for name in topics if not found[name]):
            telemetry.warn(MISSING, str(missing_topics(app.settings, missing)))


def check_dependencies(app: App, parts: Collection[str]) -> None:
    """Refuse consumers of a topic that is not cut like the one of their dependencies.

    Raises:
        ConfigurationError: the topics have different numbers of partitions.
        UnavailableError: no broker answers.
    """
    consumers = app.consumers if "consumers" in parts else []
    pairs = {
        (declared.topic, one.topic)
        for declared in consumers
        for one in declared.dependencies
        if one.topic != declared.topic
    }
    if not pairs:
        return
    counts = list_partitions(app.settings, {topic for pair in pairs for topic in pair})
    for topic, other in sorted(pairs):
        # Of a missing topic nothing is known: the gate stays closed.
        if counts[topic] and counts[other] and counts[topic] != counts[other]:
            raise ConfigurationError(
                f"the consumer of {topic!r}, which has {counts[topic]} partitions, "
                f"waits for groups that read {other!r}, which has {counts[other]}, or "
                "is derived from it: one partition would wait for several, and a slow "
                "one hold up records that have nothing to do with it. Give both topics "
                "the same number of partitions and the same keys, or name groups that "
                f"read {topic!r}"
            )


def refuse_shared_groups(
    database: Database, app: App, parts: Collection[str], installation: UUID
) -> None:
    """Refuse to join a group whose members serve another database.

    They and this service would read a share of the partitions each. Where Kafka does
    not say who the members are, the start goes on.

    Raises:
        ConfigurationError: there is such a group.
        UnavailableError: the database does not answer.
    """
    if "consumers" not in parts:
        return
    pairs = [(one.group, one.topic) for one in app.consumers]
    pairs += [(one.group, one.topic) for one in app.transactionals]
    read: dict[str, set[str]] = {}
    for group, topic in pairs:
        read.setdefault(group, set()).add(topic)
    away: list[UnavailableError] = []

    def find_pods() -> set[str]:
        try:
            return _read_pods(database)
        except UnavailableError as error:
            away.append(error)
            raise

    try:
        for found in find_shared(app.settings, installation, read, find_pods):
            raise ConfigurationError(f"{found}: {APART}")
    except UnavailableError as error:
        if error in away:
            raise


def _read_pods(database: Database) -> set[str]:
    with database.connect("start", answer_within=database.timeout) as connection:
        return {pod for (pod,) in connection.execute(database.queries["read_pods"])}


def check_model_tables(database: Database, app: App, parts: Collection[str]) -> None:
    """Refuse a start whose read models could not be written, or that others write, too.

    Where the service's role owns a table or is a superuser, roles are not separated:
    that others may write it is only a warning.

    Raises:
        ConfigurationError: a table lacks the key, its uniqueness or the version, the
            service's role may not write it, or another role may.
    """
    consumers = app.consumers if "consumers" in parts else []
    if not any(one.is_read_model for one in consumers):
        return
    with database.connect("start", answer_within=database.timeout) as connection:
        versions.add(connection, database.queries, consumers)
        versions.place(connection, database.queries, consumers)
        tables = [table for one in consumers for table in one.tables]
        found = find_tables(connection, database.queries, tables)
    for table in found:
        for fault in (*table.find_faults(), *table.find_lacking()):
            raise ConfigurationError(f"{fault.what}: {fault.way_out}")
        for fault in table.find_others():
            line = f"{fault.what}: {fault.way_out}"
            if not table.is_owner:
                raise ConfigurationError(line)
            telemetry.warn(f"the writers of {table.name}", line)


def check_places(database: Database, app: App, parts: Collection[str]) -> None:
    """Refuse a start that could not find which jobs a record has.

    Raises:
        ConfigurationError: the table of jobs lacks the index for it.
    """
    tells = "consumers" in parts and any(one.done for one in app.consumers)
    waits = "executor" in parts and bool(find_placed(app))
    if not (tells or waits):
        return
    with database.connect("start", answer_within=database.timeout) as connection:
        row = connection.execute(
            database.queries["has_places_index"], {"schema": database.schema}
        ).fetchone()
    if row is not None:
        return
    schema = quote(database.schema)
    who = "a consumer has done=True" if tells else "a job type has `after`"
    raise ConfigurationError(
        f"{who}, and the table of jobs lacks the index jobs_of_place, or it is "
        f"invalid. Run `drop index if exists {schema}.jobs_of_place` and `create index "
        f"concurrently jobs_of_place on {schema}.jobs (source, record_offset, id) "
        "where source is not null`"
    )


def job_consumers(app: App) -> list[Subscription]:
    """The consumers whose partitions are origins of jobs."""
    return [one for one in app.consumers if not one.is_read_model]


def read_installation(database: Database) -> tuple[UUID, int, str]:
    """The database's identity, its number of shards, and its environment."""
    with database.connect("start", answer_within=database.timeout) as connection:
        row = connection.execute(database.queries["read_installation"]).fetchone()
    return cast("tuple[UUID, int, str]", row)


def choose_origins(database: Database, setting: str) -> frozenset[str]:
    """The origins that the setting ``origins`` names; none if it is empty.

    Raises:
        ConfigurationError: it names an origin that no declared topic has.
    """
    if not setting:
        return frozenset()
    with database.connect("start", answer_within=database.timeout) as connection:
        every = frozenset(all_origins(database, connection))
    if setting == ALL_ORIGINS:
        return every
    chosen = frozenset(name.strip() for name in setting.split(","))
    if unknown := sorted(chosen - every):
        raise ConfigurationError(
            f"JOBS_LIB_ORIGINS names {', '.join(unknown)}, and no declared topic has "
            "such a partition: see `jobs-lib topics`"
        )
    return chosen


def all_origins(database: Database, connection: psycopg.Connection[Any]) -> list[str]:
    """The partitions of all declared topics, as origins."""
    rows = connection.execute(database.queries["read_topics"]).fetchall()
    return [f"{topic}/{n}" for topic, count, _ in rows for n in range(count)]
