"""What Spark's tasks do with the rows of a frame: encode them, and stage them by range.

A group has all rows of a range, so a task sees all versions of a key. Spark runs a task
at least once; :func:`jobs_lib.reexport.staging.stage_range` loads a range exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jobs_lib.errors import JobsError, ReexportError
from jobs_lib.kafka.checks import check_key, check_size
from jobs_lib.reasons import explain
from jobs_lib.reexport.staging import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.reexport import Loading
    from jobs_lib.schemas.codec import Encoder
    from spark_bridge.loader import Target

    Rows = Callable[[tuple[Any, ...], pa.Table], pa.Table]
    BothRows = Callable[[tuple[Any, ...], pa.Table, pa.Table], pa.Table]

KEY, VERSION, RANGE = "jobs_lib_key", "jobs_lib_version", "jobs_lib_range"
"""The columns of ours in a frame."""


@dataclass(frozen=True, slots=True)
class StateEncoder:
    """Makes the bytes of a topic's states; it can be sent to a task."""

    name: str
    """The topic's name in Kafka."""
    compacted: bool
    largest: int
    """Bytes that a record's key and value may have."""
    encoder: Encoder

    @classmethod
    def of(cls, entity: Entity) -> Self:
        """Take the encoder of an entity's topic.

        Raises:
            ConfigurationError: the schema of the topic is not registered.
            UnavailableError: the registry does not answer.
        """
        topic = entity.topic
        topic.encoder.load()
        return cls(topic.name, topic.compacted, topic.largest, topic.encoder)

    def encode(self, key: str, version: int, state: dict[str, Any]) -> State:
        """Encode one state.

        Raises:
            JobsError: key or value cannot be sent.
            ValueError: the value does not fit the topic.
        """
        check_key(self, key)
        value = self.encoder.encode(state)
        check_size(self, key, value)
        labelled = self.encoder.labels_rows
        return State(
            key, version, value, self.encoder.content_type if labelled else None
        )


def make_check(encoder: StateEncoder, columns: Sequence[str]) -> Rows:
    """Make the function that counts the states of a range that cannot be sent."""

    def check(number: tuple[Any, ...], rows: pa.Table) -> pa.Table:
        # Imported here because this runs on the worker.
        import pyarrow as pa

        refused, why = 0, None
        for key, version, state in _find_newest(rows, columns):
            try:
                encoder.encode(key, version, state)
            # The application's own validators may raise anything.
            except Exception as error:
                refused += 1
                why = why or explain(error)
        return pa.table(
            {
                "range": pa.array([number[0].as_py()], pa.int32()),
                "refused": pa.array([refused], pa.int64()),
                "why": pa.array([why], pa.string()),
            }
        )

    return check


def make_stage(
    target: Target, loading: Loading, encoder: StateEncoder, columns: Sequence[str]
) -> BothRows:
    """Make the function that loads one range.

    It gets the rows of the frame and those of the topic, and returns the range and its
    keys; no row if the range was loaded before.
    """

    def stage(number: tuple[Any, ...], rows: pa.Table, topic: pa.Table) -> pa.Table:
        import pyarrow as pa

        from jobs_lib.reexport.staging import stage_range
        from spark_bridge.partitioner import choose_partitions

        keys, versions = (topic.column(n).to_pylist() for n in ("key", "version"))
        known = dict(zip(keys, versions, strict=True))
        states, left_out = [], 0
        for key, version, state in _find_newest(rows, columns):
            # A record without a version counts as newer, whatever it is.
            if key in known and (known[key] is None or known[key] >= version):
                left_out += 1
            else:
                states.append(_encode(encoder, key, version, state))
        found = number[0].as_py()
        database = target.database()
        with database.connect("re-export task") as connection:
            count = stage_range(
                connection,
                database.queries,
                loading,
                found,
                states,
                left_out,
                lambda keys, count: choose_partitions(keys, count).tolist(),
            )
        loaded = [] if count is None else [(found, count)]
        return pa.table(
            {
                "range": pa.array([one for one, _ in loaded], pa.int32()),
                "keys": pa.array([one for _, one in loaded], pa.int64()),
            }
        )

    return stage


def _encode(
    encoder: StateEncoder, key: str, version: int, state: dict[str, Any]
) -> State:
    try:
        return encoder.encode(key, version, state)
    except (JobsError, ValueError) as error:
        raise ReexportError(
            f"a state does not fit the topic {encoder.name!r} since the DataFrame was "
            f"examined: {explain(error)}"
        ) from None


def _find_newest(
    rows: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield key, version and state of the newest row of each key."""
    order = rows.sort_by([(KEY, "ascending"), (VERSION, "ascending")])
    keys = order.column(KEY).to_pylist()
    places = [n for n, key in enumerate(keys) if keys[n + 1 : n + 2] != [key]]
    newest = order.take(places)
    versions = newest.column(VERSION).to_pylist()
    states = newest.select(columns).to_pylist(maps_as_pydicts="strict")
    for place, version, state in zip(places, versions, states, strict=True):
        yield str(keys[place]), version, state
