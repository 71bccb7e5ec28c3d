"""Show how far the read models of an app are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.consuming import versions
from jobs_lib.kafka.places import find_places
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from jobs_lib.app import App


@dataclass(frozen=True, slots=True)
class ModelPart:
    """How far a read model is in a partition of its topic."""

    table: str
    """Its first table, by the name that it has now."""
    version: int
    current: bool
    """Whether readers see this version of the read model."""
    group: str
    topic: str
    partition: int
    offset: int | None
    """The offset to go on from; None if it has read nothing."""
    left: int
    """Offsets from there to the partition's end. Some of the last ones may have no
    record, such as the markers of transactions."""
    failed_offset: int | None
    """The record at which the partition stands still; None if it does not."""
    failure: str | None
    """Why, without values of records."""
    skipped: int
    """Records that were skipped."""
    resync_left: int | None
    """Offsets that a re-synchronisation has still to read; None if there is none."""
    resync_failed_offset: int | None
    """The record at which the re-synchronisation stands still; None if it does not."""
    resync_failure: str | None
    """Why, likewise."""


def place_tables(app: App) -> Database:
    """Give the tables of an app's read models the names that they have now.

    Returns the database.

    Raises:
        UnavailableError: it does not answer.
    """
    database = Database.of(app.settings)
    with database.connect("versions", answer_within=database.timeout) as connection:
        versions.place(connection, database.queries, app.consumers)
    return database


def list_read_models(app: App) -> list[ModelPart]:
    """List the partitions that the read models of an app read, by table.

    Raises:
        TopicError: a topic does not exist, or is not visible.
        UnavailableError: the database or Kafka does not answer.
    """
    database = place_tables(app)
    found: list[ModelPart] = []
    for declared in sorted(app.consumers, key=lambda one: (one.topic, one.group)):
        if declared.model is None:
            continue
        # In this order: the topic may get partitions meanwhile.
        ends = find_places(app.settings, declared.topic, "end")
        starts = find_places(app.settings, declared.topic, "start")
        names = {
            "model": declared.model.name,
            "group": declared.group,
            "topic": declared.topic,
        }
        with database.connect("status") as connection, bounded(connection, database):
            rows = connection.execute(
                database.queries["read_model_parts"], names
            ).fetchall()
        known = {row[0]: row[1:] for row in rows}
        nothing = (None, None, None, 0, None, None, None, None)
        for number, end in ends.items():
            at, failed, failure, skipped, until, reached, *stands = known.get(
                number, nothing
            )
            found.append(
                ModelPart(
                    declared.tables[0].name,
                    declared.version.number,
                    declared.is_current,
                    declared.group,
                    declared.topic,
                    number,
                    at,
                    max(0, end - (starts[number] if at is None else at)),
                    failed,
                    failure,
                    skipped,
                    None if until is None else max(0, until - (reached or 0)),
                    *stands,
                )
            )
    return found
