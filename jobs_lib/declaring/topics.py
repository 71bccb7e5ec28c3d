"""Declare topics, consumers, read models and entities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from jobs_lib.consuming.handler import Handler
from jobs_lib.consuming.keys import choose_reader
from jobs_lib.consuming.routing import choose_place
from jobs_lib.consuming.subscription import Subscription, check_words
from jobs_lib.consuming.versions import Version, name_group
from jobs_lib.declaring.arguments import (
    check_block,
    check_flags,
    check_per,
    check_seconds,
    check_tables,
    check_texts,
    check_topic,
    check_version,
)
from jobs_lib.declaring.functions import check_function, check_plain, check_takes
from jobs_lib.declaring.names import (
    check_after,
    check_name,
    check_telling,
    check_topic_name,
)
from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import Exact, name_in_kafka, plain_name
from jobs_lib.outbox.keys import check_columns
from jobs_lib.outbox.topic import Entity, Topic, has_version
from jobs_lib.partitioner import PARTITIONS_FOR_WORK, partitions_for
from jobs_lib.postgres.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import TypeForm

    from jobs_lib.consuming.handler import Per
    from jobs_lib.consuming.read_model import OnChange, ReadModel, RowOf
    from jobs_lib.consuming.transactional import Transactional
    from jobs_lib.declaring.handlers import DeclareHandler, K, V
    from jobs_lib.outbox.topic import Loader
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import Decoder, SchemaSource
    from jobs_lib.schemas.registry import Registry
    from jobs_lib.settings import Settings
    from jobs_lib.streams.stream import Stream


class TopicDeclarations:
    """The part of an app that declares the topics it writes and reads.

    Args:
        queries: finds the named queries, at the first use.
        settings: reads the settings, at the first use.
        registry: finds the schema registry, at the first use.
        serve_reexports: called with each entity; its re-exports are jobs.
        home: the topic whose partitions are the origins of the app's groups.
        streams: what the app publishes without the outbox.
        transactionals: what the app reads in transactions of Kafka.
    """

    def __init__(
        self,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
        registry: Callable[[], Registry],
        serve_reexports: Callable[[], None],
        home: str | None,
        streams: Mapping[str, Stream[Any]],
        transactionals: Sequence[Transactional],
    ) -> None:
        self._home = home
        self._transactionals = transactionals
        self._streams = streams
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
        if name in self.topics or name in self._streams:
            raise ConfigurationError(f"the topic {name!r} is declared twice")
        if any(one.is_of_exact_topic(name) for one in self.consumers):
            raise _is_ours(name)
        check_topic(name, partitions, entities, config)
        check_flags(f"the topic {name!r}", compacted=compacted, merge=merge)
        check_seconds(settle, "settle", name, most=86_400, zero=True)
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
        topic: str | Exact,
        *,
        group: str | Exact,
        type: str | None = None,
        type_header: str | None = None,
        type_field: str | None = None,
        value: TypeForm[V] = Any,
        schema: SchemaSource | Literal["registered"] | None = None,
        key_type: type[K] = str,  # type: ignore[assignment]
        per: Per = "record",
        block: int | None = None,
        block_seconds: float | None = None,
        timeout: float | None = None,
        on_gap: Literal["stop", "skip"] = "stop",
        on_error: Literal["stop", "skip"] = "stop",
        repeatable: bool = False,
        after: Sequence[tuple[str | Exact, str | Exact]] = (),
        done: bool | Literal["sent"] = False,
        derived_from: tuple[str | Exact, str | Exact] | None = None,
    ) -> DeclareHandler[V, K]:
        """Declare a function that handles the records of a topic.

        It gets a :class:`Record` of that value and a connection, whose transaction also
        stores the offset: both are committed, or neither. It may be async.

        Args:
            topic: the topic to read; the environment's template makes its name in
                Kafka, and the group's. ``Exact("their.topic")`` is another system's.
            group: the consumer group; ``Exact`` as for the topic.
            type: handle only records of this type; several functions may share a topic
                and group that way.
            type_header: the header that holds the type. Defaults to ``ce_type``.
            type_field: the field of the value that holds the type instead, a text.
            value: the type of the records' values. Defaults to whatever the JSON holds.
            schema: says that the values are Avro. ``"registered"``: they come as their
                schema in the registry says. An .avsc file's path, or its content as a
                mapping: they are brought into that form, whichever version they were
                written with. Defaults to JSON.
            key_type: the type of the keys: ``str``, ``bytes``, ``int`` for decimal
                text, or ``UUID`` for its text.
            per: ``"record"``; or ``"block"``: the function gets a list of the next
                records of one partition, in their order, in the place of a record.
            block: the most records of a block, 1 to 10,000. Defaults to the setting.
            block_seconds: a block ends after the call during which these seconds are
                over. Defaults to the setting.
            timeout: seconds that a call may take. Defaults to no limit.
            on_gap: what to do where the topic has lost records that the group has not
                read: ``"stop"`` the partition, or ``"skip"`` them.
            on_error: what to do with a record that cannot be read or handled:
                ``"stop"`` the partition until it can, or ``"skip"`` it: its place goes
                into the table ``skipped``, and the rest goes on.
            repeatable: whether a replay may hand the function records that it has
                handled before, and the result is the same.
            after: pairs of a topic and a consumer group: a record waits until each of
                these groups has handled it. For another topic than this one, a record
                names the one that it was made of in its header ``ce_derivedfrom``.
            done: whether to tell the group ``<group>.done`` how far the records are
                done with all jobs that they have led to, for those who wait for that.
                ``"sent"``: and until all that they have written to the outbox is in
                Kafka.
            derived_from: the topic that these records are made of, and the group that
                tells how far they were made, such as ``maker.done``. The group
                ``<group>.done`` is then told, too, how far that topic is done.

        Raises:
            ConfigurationError: the arguments do not go together, or not with those of
                another function of the topic and group.
        """

        what = f"the consumer of {topic!r} in the group {group!r}"
        if type is not None:
            check_texts(what, type=type)
        place = choose_place(type_header, type_field, what)
        read_key = choose_reader(key_type, what)
        takes = check_per(per, what)
        check_block(block, block_seconds, what)
        check_seconds(timeout, "timeout", what)
        waits = check_after(after, topic, group, what)
        telling = check_telling(done, derived_from, topic, what)
        decoder = self._make_decoder(plain_name(topic), value, schema)

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            check_function(function, what)
            check_takes(function, (takes, "conn"), what)
            declared = self._declare_consumer(topic, group)
            declared.agree(place, block, block_seconds, telling, waits)
            handler = Handler(function, decoder, read_key, per, timeout)
            declared.add_handler(handler, type, on_gap, on_error, repeatable)
            return function

        return cast("DeclareHandler[V, K]", declare)

    def read_model(
        self,
        topic: str | Exact,
        *,
        group: str | Exact,
        table: str | None = None,
        key: str | None = None,
        tables: Mapping[str, str] | None = None,
        versions: Literal["row", "side"] | None = None,
        value: TypeForm[V] = Any,
        schema: SchemaSource | Literal["registered"] | None = None,
        key_type: type[K] = str,  # type: ignore[assignment]
        block: int | None = None,
        block_seconds: float | None = None,
        gapless: bool = False,
        on_change: OnChange[V, K] | OnChange[V | None, K] | None = None,
        on_gap: Literal["stop", "skip"] = "stop",
        on_error: Literal["stop", "skip"] = "stop",
        version: int | None = None,
        after: Sequence[tuple[str | Exact, str | Exact]] = (),
        done: bool | Literal["sent"] = False,
        derived_from: tuple[str | Exact, str | Exact] | None = None,
    ) -> Callable[[RowOf[V, K]], RowOf[V, K]]:
        """Declare a function that maps the records of a state topic to rows of a table.

        The function gets a :class:`Record` and returns the row's columns as a mapping,
        or None to remove the row; it is not called for a tombstone. Row and offset are
        written in one transaction. A row is only replaced by a newer version, and comes
        back only by one that is newer than its end.

        Args:
            topic: the compacted topic to read, or ``Exact("their.topic")``.
            group: the consumer group.
            table: ``table`` or ``schema.table``, with a column ``version bigint``.
            key: the column that takes the record's key.
            tables: instead of these two, several tables, each with its column for the
                record's key. The function returns a mapping by table: of each one row,
                a list of rows, or None. Name a table before those that refer to it.
            versions: whether the versions stand in the table (``"row"``), or beside it
                (``"side"``), which leaves its form to the application. Several tables
                always have theirs beside them.
            value: the type of the records' values. Defaults to whatever the JSON holds.
            schema: says that the values are Avro. ``"registered"``: they come as their
                schema in the registry says. An .avsc file's path, or its content as a
                mapping: they are brought into that form, whichever version they were
                written with. Defaults to JSON.
            key_type: the type of the keys: ``str``, ``bytes``, ``int`` for decimal
                text, or ``UUID`` for its text.
            block: the most records of a block, 1 to 10,000. Defaults to the setting.
            block_seconds: how long a block may take, in seconds, where that can be
                known. Defaults to the setting.
            gapless: whether the versions of a key grow by one, so that a missing one
                means that a record was lost, which is reported (``record.missing``).
                They do not where a topic merges records or is compacted soon.
            on_change: a function of ``(records, conn)`` that is called in the block's
                transaction with the records that have changed rows: the last one of
                each key, without those of re-exports. It may enqueue jobs, for effects
                elsewhere.
            on_gap: what to do where a topic that is not compacted has deleted records
                before they were read: ``"stop"`` the partition, or ``"skip"`` them.
            on_error: what to do with a record that cannot be read or written:
                ``"stop"`` the partition until it can, or ``"skip"`` it: its place goes
                into the table ``skipped``, and the rest goes on.
            version: of the read model, from 1 on. A second one beside the first fills
                tables of other names from the topic's start, in a group of its own and
                without ``on_change``, until ``jobs-lib readmodel switch`` gives it the
                names. Defaults to 1.
            after: pairs of a topic and a consumer group, as for :meth:`consumer`.
            done: as for :meth:`consumer`, for the jobs that ``on_change`` enqueues.
            derived_from: as for :meth:`consumer`.

        Raises:
            ConfigurationError: the arguments do not go together.
        """

        named = table if tables is None else list(tables)
        what = f"the mapping of {topic!r} to {named!r}"
        read_key = choose_reader(key_type, what)
        check_block(block, block_seconds, what)
        if not isinstance(gapless, bool):
            raise ConfigurationError(f"gapless is True or False, not {gapless!r}")
        check_words(on_gap=on_gap)
        waits = check_after(after, topic, group, what)
        telling = check_telling(done, derived_from, topic, what)
        keys, beside = check_tables(table, key, tables, versions, what)
        number = check_version(version, keys, what)
        # Not before there is a table to write: they load psycopg.
        from jobs_lib.consuming.read_model import RowModel
        from jobs_lib.consuming.side_model import SideModel, put_in
        from jobs_lib.consuming.table_faults import ModelTable

        decoder = self._make_decoder(plain_name(topic), value, schema)

        def declare(function: RowOf[V, K]) -> RowOf[V, K]:
            check_plain(function, what)
            check_takes(function, ("record",), what)
            own = name_group(group, number)
            declared = self._declare_consumer(topic, own)
            more = decoder, self._queries, read_key, number
            if not beside:
                ((name, column),) = keys.items()
                model: ReadModel = RowModel(function, name, column, *more)
            elif table is None:
                model = SideModel(function, keys, *more)
            else:
                model = SideModel(put_in(table, function), keys, *more)
            if on_change is not None:
                told = f"the on_change of {topic!r}"
                check_function(on_change, told)
                check_takes(on_change, ("records", "conn"), told)
                model.on_change = Handler(on_change, decoder, read_key, "block")
            model.gapless = gapless
            model.function, model.key_type = function, key_type
            declared.set_model(model, decoder, on_error, waits, telling)
            declared.on_gap = on_gap
            declared.set_tables(
                [ModelTable(*one, beside) for one in keys.items()],
                Version(number, group, is_said=version is not None),
            )
            declared.block, declared.block_seconds = block, block_seconds
            return function

        return declare

    def entity(
        self,
        topic: Topic[V],
        *,
        source: str,
        key: str | Sequence[str],
        name: str | None = None,
    ) -> Callable[[Loader[V]], Loader[V]]:
        """Declare how re-exports read the current states of an entity.

        The function gets a connection and a list of keys, and returns the states by
        key, of the topic's type. A key that it leaves out is gone and becomes a
        tombstone. For such a key it may return ``Gone(version)``, the version of the
        tombstone.

        Args:
            topic: the topic that the states are sent to.
            source: the service's own table, ``table`` or ``schema.table``.
            key: the column whose text is the record's key; or several columns, whose
                texts :func:`jobs_lib.join_key` makes into one.
            name: the entity's name in commands. Defaults to ``source``.
        """

        if not isinstance(topic, Topic):
            raise ConfigurationError(
                f"the topic given to @app.entity is {topic!r}: give what app.topic "
                "returns"
            )
        check_texts(f"the entity of {topic.name!r}", source=source)
        if name is not None:
            check_texts(f"the entity of {source!r}", name=name)
        columns = check_columns(key, f"the entity {name or source!r}")

        def declare(function: Loader[V]) -> Loader[V]:
            what = f"the loader of {name or source!r}"
            check_plain(function, what)
            check_takes(function, ("conn", "keys"), what)
            entity = Entity(name or source, topic, source, columns, function)
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
        for stream in self._streams.values():
            stream.encoder.load()
        for declared in self.consumers:
            declared.load()
        for one in self._transactionals:
            one.decoder.load()

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

    def _declare_consumer(self, topic: str | Exact, group: str | Exact) -> Subscription:
        check_topic_name(topic.name if isinstance(topic, Exact) else topic)
        check_name(
            group.name if isinstance(group, Exact) else group, "a consumer group"
        )
        if isinstance(topic, Exact) and topic.name in self.topics:
            raise _is_ours(topic.name)
        for declared in self.consumers:
            if declared.is_of(topic, group):
                return declared
        declared = Subscription(topic, group, self._read_settings)
        self.consumers.append(declared)
        return declared


def _is_ours(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"Exact({name!r}) is this app's own topic, which the environment's template "
        f"names in Kafka: read it as {name!r}. Exact is for topics of other systems"
    )
