"""Declare topics, consumers, read models and entities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypeVar

from jobs_lib.consuming.subscription import Subscription
from jobs_lib.declaring.arguments import check_partitions, check_texts
from jobs_lib.declaring.functions import check_plain, check_takes
from jobs_lib.declaring.names import check_name, check_topic_name
from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import name_in_kafka
from jobs_lib.outbox.topic import Entity, Topic, has_version
from jobs_lib.partitioner import PARTITIONS_FOR_WORK, partitions_for
from jobs_lib.postgres.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import TypeForm

    from jobs_lib.consuming.read_model import RowOf
    from jobs_lib.consuming.subscription import RecordHandler
    from jobs_lib.outbox.topic import Loader
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import Decoder, SchemaSource
    from jobs_lib.schemas.registry import Registry
    from jobs_lib.settings import Settings

V = TypeVar("V", default=Any)


class TopicDeclarations:
    """The part of an app that declares the topics it writes and reads.

    Args:
        queries: finds the named queries, at the first use.
        settings: reads the settings, at the first use.
        registry: finds the schema registry, at the first use.
        serve_reexports: called with each entity; its re-exports are jobs.
        home: the topic whose partitions are the origins of the app's groups.
    """

    def __init__(
        self,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
        registry: Callable[[], Registry],
        serve_reexports: Callable[[], None],
        home: str | None = None,
    ) -> None:
        self._home = home
        self.topics: dict[str, Topic[Any]] = {}
        self.consumers: list[Subscription] = []
        self.entities: dict[str, Entity] = {}
        self._queries = queries
        self._read_settings = settings
        self._registry = registry
        self._serve_reexports = serve_reexports
        self._hints = Hints()

    def topic(
        self,
        name: str,
        *,
        value: TypeForm[V] = Any,
        schema: SchemaSource | None = None,
        compacted: bool = False,
        partitions: int | None = None,
        entities: int | None = None,
        config: Mapping[str, str] | None = None,
        merge: bool | None = None,
        settle: float = 0.0,
    ) -> Topic[V]:
        """Declare a topic that this service writes to, through the outbox.

        Args:
            name: the topic's name; its name in Kafka follows the environment's
                template.
            value: the type of the values: a dataclass, a pydantic model, ``bytes``, …
                Type checkers check ``send`` by it. Defaults to any value with a JSON
                form.
            schema: makes the values Avro: the path of an .avsc file, or its content as
                a mapping. The registry must know it before the first ``send``: see
                ``jobs-lib schemas register``. Defaults to JSON.
            compacted: whether only the last record of each key is kept.
            partitions: how many it is created with if it does not exist. Defaults to
                the number for ``entities``; without these, to 100 for the app's home
                topic, so that its work can be spread for years. Give 100 as well if
                another service makes this topic its home.
            entities: how many keys the topic will have: 3 partitions up to 100,000 of
                them, 8 up to a million, then 16. Defaults to few.
            config: the topic's settings in Kafka, besides the defaults: lz4, and if it
                is compacted, tombstones kept for two days.
            merge: whether only the last of several rows of a key is sent if they leave
                together, which is right for states and wrong for events. Defaults to
                ``compacted``.
            settle: seconds for which the changes of a key are collected, from its first
                one on, before they leave as one record; needs ``merge``.

        Raises:
            ConfigurationError: the topic is declared already, or the arguments do not
                go together.
        """
        check_topic_name(name)
        if name in self.topics:
            raise ConfigurationError(f"the topic {name!r} is declared twice")
        check_partitions(partitions, name)
        merges = compacted if merge is None else merge
        if settle and not merges:
            raise ConfigurationError(
                f"the topic {name!r} settles for {settle:g} s and merges nothing: "
                "leave `settle` out, or say merge=True"
            )
        # Not before there is a type to read: it loads pydantic.
        from jobs_lib.schemas.codec import make_encoder

        topic = Topic(
            name,
            encoder=make_encoder(name, value, schema, self._registry, self._in_kafka),
            versioned=has_version(value),
            compacted=compacted,
            partitions=partitions or self._choose_partitions(name, entities),
            config=config or {},
            merge=merges,
            settle=settle,
            entities=self.entities,
            queries=self._queries,
            settings=self._read_settings,
            hint=self._choose_hint,
        )
        self.topics[name] = topic
        return topic

    def consumer(
        self,
        topic: str,
        *,
        group: str,
        type: str | None = None,
        value: TypeForm[V] = Any,
        schema: SchemaSource | Literal["registered"] | None = None,
        on_gap: Literal["stop", "skip"] = "stop",
        on_error: Literal["stop", "skip"] = "stop",
        repeatable: bool = False,
    ) -> Callable[[RecordHandler[V]], RecordHandler[V]]:
        """Declare a function that handles the records of a topic.

        It gets a :class:`Record` of that value and a connection, whose transaction also
        stores the offset: both are committed, or neither.

        Args:
            topic: the topic to read; the environment's template makes its name in
                Kafka, and the group's.
            group: the consumer group.
            type: handle only records whose header ``ce_type`` is this; several
                functions may share a topic and group that way.
            value: the type of the records' values. Defaults to whatever the JSON holds.
            schema: says that the values are Avro. ``"registered"``: they come as their
                schema in the registry says. An .avsc file's path, or its content as a
                mapping: they are brought into that form, whichever version they were
                written with. Defaults to JSON.
            on_gap: what to do where the topic has lost records that the group has not
                read: ``"stop"`` the partition, or ``"skip"`` them.
            on_error: what to do with a record that cannot be read or handled:
                ``"stop"`` the partition until it can, or ``"skip"`` it: its place goes
                into the table ``skipped``, and the rest goes on.
            repeatable: whether a replay may hand the function records that it has
                handled before, and the result is the same.

        Raises:
            ConfigurationError: the arguments do not go together, or not with those of
                another function of the topic and group.
        """

        decoder = self._make_decoder(topic, value, schema)

        def declare(function: RecordHandler[V]) -> RecordHandler[V]:
            what = f"the consumer of {topic!r} in the group {group!r}"
            check_plain(function, what)
            check_takes(function, ("record", "conn"), what)
            declared = self._declare_consumer(topic, group)
            declared.add_handler(function, type, decoder, on_gap, on_error, repeatable)
            return function

        return declare

    def read_model(
        self,
        topic: str,
        *,
        table: str,
        key: str,
        group: str,
        value: TypeForm[V] = Any,
        schema: SchemaSource | Literal["registered"] | None = None,
        on_error: Literal["stop", "skip"] = "stop",
    ) -> Callable[[RowOf[V]], RowOf[V]]:
        """Declare a function that maps the records of a state topic to rows of a table.

        The function gets a :class:`Record` and returns the row's columns as a mapping,
        or None to remove the row; it is not called for a tombstone. Row and offset are
        written in one transaction. A row is only replaced by a newer version, and comes
        back only by one that is newer than its end.

        Args:
            topic: the compacted topic to read.
            table: ``table`` or ``schema.table``, with a column ``version bigint``.
            key: the column that takes the record's key.
            group: the consumer group.
            value: the type of the records' values. Defaults to whatever the JSON holds.
            schema: says that the values are Avro. ``"registered"``: they come as their
                schema in the registry says. An .avsc file's path, or its content as a
                mapping: they are brought into that form, whichever version they were
                written with. Defaults to JSON.
            on_error: what to do with a record that cannot be read or written:
                ``"stop"`` the partition until it can, or ``"skip"`` it: its place goes
                into the table ``skipped``, and the rest goes on.

        Raises:
            ConfigurationError: the arguments do not go together.
        """

        # Not before there is a table to write: it loads psycopg.
        from jobs_lib.consuming.read_model import ReadModel

        decoder = self._make_decoder(topic, value, schema)

        def declare(function: RowOf[V]) -> RowOf[V]:
            what = f"the mapping of {topic!r} to {table!r}"
            check_texts(what, table=table, key=key)
            check_plain(function, what)
            check_takes(function, ("record",), what)
            declared = self._declare_consumer(topic, group)
            model = ReadModel(
                function,
                table,
                key,
                decoder,
                lambda: self._read_settings().schema_name,
            )
            declared.set_applier(model.apply, decoder, on_error)
            return function

        return declare

    def entity(
        self, topic: Topic[V], *, source: str, key: str, name: str | None = None
    ) -> Callable[[Loader[V]], Loader[V]]:
        """Declare how re-exports read the current states of an entity.

        The function gets a connection and a list of keys, and returns the states by
        key, of the topic's type. A key that it leaves out is gone and becomes a
        tombstone. For such a key it may return ``Gone(version)``, the version of the
        tombstone.

        Args:
            topic: the topic that the states are sent to.
            source: the service's own table, ``table`` or ``schema.table``.
            key: the column whose text form is the record's key.
            name: the entity's name in commands. Defaults to ``source``.
        """

        if not isinstance(topic, Topic):
            raise ConfigurationError(
                f"the topic given to @app.entity is {topic!r}: give what app.topic "
                "returns"
            )

        def declare(function: Loader[V]) -> Loader[V]:
            what = f"the loader of {name or source!r}"
            check_plain(function, what)
            check_takes(function, ("conn", "keys"), what)
            entity = Entity(name or source, topic, source, key, function)
            if entity.name in self.entities:
                raise ConfigurationError(
                    f"the entity {entity.name!r} is declared twice"
                )
            self.entities[entity.name] = entity
            self._serve_reexports()
            return function

        return declare

    def load_schemas(self) -> None:
        """Look up the ids of the topics' schemas, so that no ``send`` has to.

        A service does this when it starts. Call it at the start of any other program
        that sends Avro: otherwise the first ``send`` of a topic asks the registry while
        the caller's transaction is open.

        Raises:
            ConfigurationError: a schema is not registered, or no registry is set.
            UnavailableError: the registry does not answer.
        """
        for topic in self.topics.values():
            topic.encoder.load()
        for declared in self.consumers:
            declared.load()

    def _make_decoder(
        self,
        topic: str,
        value: Any,
        schema: SchemaSource | Literal["registered"] | None,
    ) -> Decoder:
        from jobs_lib.schemas.codec import make_decoder

        return make_decoder(topic, value, schema, self._registry)

    def _in_kafka(self, name: str) -> str:
        return name_in_kafka(self._read_settings(), name)

    def _choose_hint(self, shard: str) -> str | None:
        return self._hints.choose(shard) if self._read_settings().notify else None

    def _choose_partitions(self, name: str, entities: int | None) -> int:
        """States and events need few partitions; each costs the broker something."""
        if entities is None and name == self._home:
            return PARTITIONS_FOR_WORK
        return partitions_for(entities or 0)

    def _declare_consumer(self, topic: str, group: str) -> Subscription:
        check_topic_name(topic)
        check_name(group, "a consumer group")
        for declared in self.consumers:
            if declared.is_of(topic, group):
                return declared
        declared = Subscription(topic, group, self._read_settings)
        self.consumers.append(declared)
        return declared
