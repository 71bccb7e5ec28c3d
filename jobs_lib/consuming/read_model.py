"""Read models: tables kept equal to a state topic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from typing_extensions import TypeVar

from jobs_lib.consuming.arrays import make_writer, write_array
from jobs_lib.consuming.changes import find_missing, read_changes
from jobs_lib.consuming.keys import KnownKey
from jobs_lib.consuming.record import REEXPORT, Record, read_text
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.consuming.table_statements import TableStatements, as_type
from jobs_lib.consuming.versions import name_model

if TYPE_CHECKING:
    import psycopg
    from confluent_kafka import Message
    from psycopg import sql

    from jobs_lib.consuming.arrays import Write
    from jobs_lib.consuming.changes import Change, Changes, Missing
    from jobs_lib.consuming.handler import Handler
    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.consuming.placing import Placing
    from jobs_lib.consuming.progress import Effects
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.postgres.session import Session
    from jobs_lib.schemas.codec import Decoder

V = TypeVar("V", default=Any)
K = TypeVar("K", default=str)
RowOf = Callable[[Record[V, K]], Mapping[str, Any] | None]
OnChange = Callable[[list[Record[V, K]], Any], Any]

_CHANGE = {
    "record_key": "text",
    "version": "bigint",
    "record_offset": "bigint",
    "appended_ms": "bigint",
}
"""What each change has beside the row, with its type."""
_STATES = {True: "upsert_states", False: "upsert_placed"}
_STATES_AGAIN = {True: "restate_states", False: "upsert_placed"}
_ENDS = {True: "remove_ended", False: "remove_placed"}
"""The templates for changes with and without versions."""


class ReadModel(ABC):
    """Applies the records of a topic to tables.

    Only a newer version replaces a row, so repeated and older records change nothing.
    They do not bring a deleted row back either: the version of a key's tombstone
    outlives its row. Records without a version (header ``ce_version``) are compared by
    their places: within a partition by the offset, else by their time. A tombstone
    without a version ends whatever version its key has.

    Args:
        table: the first one, by the name that readers know.
        version: of the model.
        row_of: makes rows of a record; None to have no row.
        decoder: reads the values.
        queries: the statements, found at the first use.
        read_key: reads the keys.
    """

    def __init__(
        self,
        table: str,
        version: int,
        row_of: RowOf[Any, Any],
        decoder: Decoder,
        queries: Callable[[], Queries],
        read_key: KeyReader = read_text,
    ) -> None:
        self._name = name_model(table, version)
        self._first_table = table
        self._row_of = row_of
        self._decoder = decoder
        self._queries = queries
        self._read_key = read_key
        self.on_change: Handler | None = None
        """Called with the records that have changed rows."""
        self.gapless = False
        """Whether the versions of a key grow by one, so that a gap is an alarm."""
        self.function: object = row_of
        """What the application has declared: it stands for the model in its code."""
        self.key_type: type = str
        """The declared type of the records' keys."""
        self.again = False
        """Whether it re-synchronises the tables: the states that they have are written
        again, in case that they are wrong, and the keys that the topic shows are noted.
        """

    @property
    def name(self) -> str:
        """By which the database knows the keys of the model, for good."""
        return self._name

    @property
    def asked_as(self) -> dict[str, str]:
        """The names by which statements about answers know it."""
        return {"model": self._first_table, "own": self._name}

    @abstractmethod
    def place(self, places: Mapping[str, str]) -> None:
        """Give the tables the names that they have now, by those that readers know."""

    def make_anew(self) -> Self:
        """Make another one that re-synchronises the tables, and does nothing else."""
        other = copy(self)
        other.on_change, other.gapless, other.again = None, False, True
        return other

    def read(self, messages: Sequence[Message], highest: int | None = None) -> Changes:
        """Read the records of a block, of one partition.

        Args:
            messages: the records.
            highest: the highest offset to go on from that the partition ever had.

        Raises:
            BlockError: a record cannot be read, or the function has failed.
        """
        return read_changes(
            messages,
            self._decoder,
            self._read_key,
            self._row_of,
            highest,
            keeps_records=self.on_change is not None,
            keeps_versions=self.gapless,
        )

    def find_missing(
        self, connection: psycopg.Connection[Any], changes: Changes
    ) -> Missing | None:
        """Find records that were never read; call it before :meth:`write`."""
        if not changes.versions:
            return None
        write = make_writer(connection)
        texts = {key: write(key) or "" for key in changes.versions}
        with connection.transaction():
            known = self._read_versions(connection, [*texts.values()], write)
        return find_missing(
            changes,
            {key: known[text] for key, text in texts.items() if text in known},
        )

    @abstractmethod
    def _read_versions(
        self, connection: psycopg.Connection[Any], keys: Sequence[str], write: Write
    ) -> dict[str, int]:
        """Read the highest versions of these keys, of those that have one."""

    @abstractmethod
    def learn_types(
        self, connection: psycopg.Connection[Any], changes: Changes
    ) -> None:
        """Ask the database for the types of the columns, if one is not known yet.

        Raises:
            ConfigurationError: a table is missing, or lacks a column.
        """

    @abstractmethod
    def write(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        topic_id: UUID | None,
    ) -> None:
        """Write the changes in the open transaction, in the pipeline if there is one.

        Args:
            connection: with the transaction.
            changes: of a block.
            topic_id: the topic, as Kafka names it for ever; None if that is not known.

        Of changes that are left to another group, it writes states of the very versions
        that are there: nobody is to be told of those.
        """

    @abstractmethod
    def digest(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        keys: Sequence[str],
        write: Write,
    ) -> dict[str, Any]:
        """Digest what the tables hold now for these keys of the changes, by key.

        Keys without rows are left out. The columns are those that the changes write.
        """

    def write_and_tell(
        self,
        connection: Session[Any],
        changes: Changes,
        topic_id: UUID | None,
        messages: Sequence[Message],
        group: str,
        effects: Effects,
        placing: Placing | None = None,
    ) -> None:
        """Write the changes, and call ``on_change`` with the records that changed rows.

        It gets the last record of each key, in their order. Those of re-exports are
        left out: they tell nothing new.

        Args:
            connection: with the transaction.
            changes: of the block.
            topic_id: as for :meth:`write`.
            messages: of the block.
            group: the consumer group.
            effects: which records have effects.
            placing: gives jobs the place of the block; None for none.

        Raises:
            BlockError: ``on_change`` has failed.
        """
        assert self.on_change is not None
        write = make_writer(connection)
        records = {write(key) or "": one for key, one in changes.records.items()}
        before = self.digest(connection, changes, [*records], write)
        self.write(connection, changes, topic_id)
        after = self.digest(connection, changes, [*records], write)
        changed = [
            record
            for key, record in records.items()
            if record.cause != REEXPORT
            and effects.begin <= record.offset < effects.end
            and before.get(key) != after.get(key)
        ]
        if not changed:
            return
        changed.sort(key=lambda record: record.offset)
        connection.lend()
        try:
            self.on_change.handle(connection, changed, messages, group, placing)
        except BaseException as error:
            raise BlockError(None, error) from error
        connection.take_back()

    def note_shown(
        self, connection: psycopg.Connection[Any], changes: Changes, write: Write
    ) -> None:
        """Note that the topic shows these keys, in the open transaction."""
        left = [] if changes.left is None else changes.left.waves
        keys = {change[0] for wave in (*changes.waves, *left) for change in wave}
        given = {"model": self._name, "record_key": write_array([*keys], write)}
        connection.execute(self._queries()["note_shown"], given, prepare=True)
        connection.execute(self._fill(connection, "keep_shown"), given, prepare=True)

    def find_unshown(self, connection: psycopg.Connection[Any]) -> None:
        """Find the noted keys that the topic has not shown, for their removal."""
        connection.execute(
            self._fill(connection, "find_unshown"), {"model": self._name}
        )

    def _fill(self, connection: psycopg.Connection[Any], template: str) -> sql.Composed:
        """Fill in a template that compares keys as the table's column has them."""
        key_type = self._find_key_type(connection)
        return self._queries().fill(template, key_type=as_type(key_type))

    def _find_key_type(self, connection: psycopg.Connection[Any]) -> str:
        """Find the type of the column that has the keys and their versions."""
        table = self.keyed_table
        return "text" if table is None else table.learn_key_type(connection)

    @abstractmethod
    def list_keys(self) -> sql.Composable:
        """Make a query of the columns key and version, of all keys that have rows."""

    def find_key(
        self, connection: psycopg.Connection[Any], message: Message
    ) -> KnownKey:
        """Find what the tables have of the key of a message.

        Raises:
            RecordError: the key is not of the declared type.
            ConfigurationError: a table is missing.
        """
        key = make_writer(connection)(self._read_key(message))
        found = self._find_key(connection, {"model": self._name, "key": key})
        return KnownKey(*found) if found else KnownKey()

    @abstractmethod
    def _find_key(
        self, connection: psycopg.Connection[Any], named: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Find the fields of what is known of a key; None if there is nothing."""

    @abstractmethod
    def note_keys(self, connection: psycopg.Connection[Any]) -> None:
        """Note all keys that the model has, of which the topic has shown none yet."""

    @abstractmethod
    def remove_unshown(
        self, connection: psycopg.Connection[Any], rows: int
    ) -> tuple[int, int]:
        """Remove the rows of noted keys that the topic has not shown.

        Rows that have changed since they were noted stay.

        Args:
            connection: with the transaction.
            rows: the most keys to look at.

        Returns how many keys it has looked at, and of how many it has removed rows.
        """

    @property
    @abstractmethod
    def keyed_table(self) -> TableStatements | None:
        """The table whose rows have the versions; None if these are beside it."""

    @abstractmethod
    def fill_known(self, template: str, key_type: str) -> sql.Composed:
        """Fill in a template about the versions that it has of keys.

        Args:
            template: the query to fill in.
            key_type: of the key's column of :attr:`keyed_table`, as SQL has it.
        """

    def forget_reached(self, connection: psycopg.Connection[Any]) -> None:
        """Delete the entities that were kept for answers and whose versions it has.

        Where it has several versions, the one counts that readers see.
        """
        table = self.keyed_table
        # By the name that readers know: the place may be the one before a switch.
        key_type = "text" if table is None else table.read_plain_key_type(connection)
        connection.execute(self.fill_known("forget_reached", key_type), self.asked_as)

    @abstractmethod
    def explain(self, error: BaseException) -> BaseException:
        """Return what is to be said of an error of :meth:`write`, without values."""


class RowModel(ReadModel):
    """Keeps one table, whose rows have their versions in a column ``version``."""

    def __init__(
        self,
        row_of: RowOf[Any, Any],
        table: str,
        key: str,
        decoder: Decoder,
        queries: Callable[[], Queries],
        read_key: KeyReader = read_text,
        version: int = 1,
    ) -> None:
        """Prepare; ``key`` is the column of ``table`` for the record's key."""
        super().__init__(table, version, row_of, decoder, queries, read_key)
        self._table = TableStatements(table, key, queries)

    def place(self, places: Mapping[str, str]) -> None:
        """See :class:`ReadModel`."""
        self._table.move(places[self._table.name])

    def learn_types(
        self, connection: psycopg.Connection[Any], changes: Changes
    ) -> None:
        """See :class:`ReadModel`."""
        columns = self._list_columns(changes)
        self._table.learn_types(connection, {"version", *columns})

    @staticmethod
    def _list_columns(changes: Changes) -> set[str]:
        return {name for (_, columns), _ in changes.kinds for name in columns or ()}

    def write(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        topic_id: UUID | None,
    ) -> None:
        """See :class:`ReadModel`."""
        write = make_writer(connection)
        place = {"topic_id": topic_id, "partition": changes.partition}
        for (has_version, columns), same in changes.kinds:
            states = _STATES_AGAIN if self.again else _STATES
            template = (_ENDS if columns is None else states)[has_version]
            values = {"model": self._name, "again": self.again, **place}
            self._write_kind(connection, template, columns or (), same, write, values)
            if template == "restate_states":
                template = "remove_ended_meanwhile"
                self._write_kind(connection, template, (), same, write, values)
        for (has_version, columns), same in changes.left.kinds if changes.left else ():
            if has_version and columns:
                self._write_kind(connection, "rewrite_states", columns, same, write)
        if self.again:
            self.note_shown(connection, changes, write)

    def _write_kind(
        self,
        connection: psycopg.Connection[Any],
        template: str,
        columns: Sequence[str],
        same: Sequence[Change],
        write: Write,
        others: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write changes of one kind; ``others`` are the statement's further values."""
        rows = (change[2] for change in same)
        values = {
            **make_change_arrays(same, write),
            **self._table.make_arrays(rows, columns, write),
            **others,
        }
        statement = self._table.compose(template, columns, _CHANGE)
        connection.execute(statement, values, prepare=True)

    def digest(
        self,
        connection: psycopg.Connection[Any],
        changes: Changes,
        keys: Sequence[str],
        write: Write,
    ) -> dict[str, Any]:
        """See :class:`ReadModel`."""
        columns = sorted(self._list_columns(changes)) or [self._table.key]
        return dict(self._table.digest_rows(connection, keys, columns, write))

    def _read_versions(
        self, connection: psycopg.Connection[Any], keys: Sequence[str], write: Write
    ) -> dict[str, int]:
        rows = connection.execute(
            self._table.compose("read_row_versions", (), {"record_key": "text"}),
            {"record_key": write_array(keys, write), "model": self._name},
            prepare=True,
        ).fetchall()
        return dict(rows)

    def list_keys(self) -> sql.Composable:
        """See :class:`ReadModel`."""
        return self._table.list_keys(is_uuid=self.key_type is UUID)

    def _find_key(
        self, connection: psycopg.Connection[Any], named: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        statement = self._table.compose_plain(connection, "find_model_row")
        return connection.execute(statement, named).fetchone()

    def note_keys(self, connection: psycopg.Connection[Any]) -> None:
        """See :class:`ReadModel`."""
        connection.execute(
            self._table.compose_plain(connection, "note_model_keys"),
            {
                "model": self._name,
                "digits_alone": self.key_type is UUID
                and self._find_key_type(connection) == "uuid",
            },
        )

    def remove_unshown(
        self, connection: psycopg.Connection[Any], rows: int
    ) -> tuple[int, int]:
        """See :class:`ReadModel`."""
        row = connection.execute(
            self._table.compose_plain(connection, "delete_unshown"),
            {"model": self._name, "rows": rows},
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    @property
    def keyed_table(self) -> TableStatements:
        """See :class:`ReadModel`."""
        return self._table

    def fill_known(self, template: str, key_type: str) -> sql.Composed:
        """See :class:`ReadModel`."""
        return self._queries().fill(
            template,
            known=self._table.fill("known_on_rows", key_type),
            is_gone=self._table.fill("gone_on_rows", key_type),
            key_type=as_type(key_type),
        )

    def explain(self, error: BaseException) -> BaseException:
        """See :class:`ReadModel`."""
        self._table.forget_types()
        return self._table.explain(error)


def make_change_arrays(changes: Sequence[Change], write: Write) -> dict[str, str]:
    """Make the values of what each change has beside its row."""
    keys, versions, _, offsets, times = zip(*changes, strict=True)
    return {
        "record_key": write_array(keys, write),
        "version": write_array(versions, write),
        "record_offset": write_array(offsets, write),
        "appended_ms": write_array(times, write),
    }
