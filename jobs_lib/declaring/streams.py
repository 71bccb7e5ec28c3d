"""Declare streams."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from jobs_lib.declaring.arguments import check_topic
from jobs_lib.declaring.functions import check_plain, check_takes
from jobs_lib.declaring.names import check_topic_name
from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import name_in_kafka
from jobs_lib.partitioner import partitions_for
from jobs_lib.streams.stream import Rules, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import psycopg
    from typing_extensions import TypeForm

    from jobs_lib.callers.caller import Autocommit
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.declaring.handlers import V
    from jobs_lib.outbox.topic import Topic
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import SchemaSource
    from jobs_lib.schemas.registry import Registry
    from jobs_lib.settings import Settings
    from jobs_lib.streams.publishing import Publishing

    Connection = psycopg.Connection[Any]

_ACKS = {0: "0", 1: "1", "all": "all"}


class StreamDeclarations:
    """The part of an app that declares its streams.

    Args:
        queries: finds the named queries, at the first use.
        settings: reads the settings, at the first use.
        registry: finds the schema registry, at the first use.
        connections: gives connections to the database.
        topics: what the app sends through the outbox.
        consumers: what the app reads.
        streams: takes those that are declared, by name.
    """

    def __init__(
        self,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
        registry: Callable[[], Registry],
        connections: Autocommit,
        topics: Mapping[str, Topic[Any]],
        consumers: Sequence[Subscription],
        streams: dict[str, Stream[Any]],
    ) -> None:
        self.streams = streams
        self._find_queries = queries
        self._stream_settings = settings
        self._stream_registry = registry
        self._connections = connections
        self._other_topics = topics
        self._readers = consumers
        self._publishing: Publishing | None = None
        self._makes_publishing = threading.Lock()

    def stream(
        self,
        name: str,
        *,
        value: TypeForm[V] = Any,
        schema: SchemaSource | None = None,
        key: str | None = None,
        acks: Literal[0, 1, "all"] = "all",
        internal: Collection[str] = (),
        check: Callable[[str, V | None, Connection], object] | None = None,
        current: Callable[[str, Connection], V | Mapping[str, Any] | None]
        | None = None,
        partitions: int | None = None,
        entities: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Stream[V]:
        """Declare a compacted topic that is the source of truth of some entities.

        This service publishes to it and waits for Kafka. Its tables follow the topic,
        by a consumer or read model.

        Args:
            name: the topic's name; its name in Kafka follows the environment's
                template.
            value: the type of the values, as for ``app.topic``.
            schema: makes the values Avro, as for ``app.topic``.
            key: the field of the values that holds the key; a value with another one
                is refused. Defaults to none.
            acks: what must have the event before a publish returns: ``"all"`` replicas
                in sync, ``1`` for the leader alone, or ``0`` for nobody.
            internal: fields that no answer has, such as a password's hash.
            check: a function of ``(key, value, conn)`` that raises a ``RefusedError``
                for an event that must not be published. The value is None for a
                delete.
            current: a function of ``(key, conn)`` that reads the state of a key from
                the table that follows the stream; None if there is none. An event that
                says the same is not sent.
            partitions: how many it is created with if it does not exist. Defaults to
                the number for ``entities``.
            entities: how many keys it will have, as for ``app.topic``.
            config: the topic's settings in Kafka, besides the defaults.

        Raises:
            ConfigurationError: the topic is declared already, or the arguments do not
                go together.
        """
        check_topic_name(name)
        if name in self.streams or name in self._other_topics:
            raise ConfigurationError(f"the topic {name!r} is declared twice")
        check_topic(name, partitions, entities, config)
        if isinstance(acks, bool) or acks not in [*_ACKS]:
            raise ConfigurationError(
                f"the stream {name!r} is declared with acks={acks!r}: give 0, 1 or "
                "'all'"
            )
        if check is not None:
            check_plain(check, f"the check of {name!r}")
            check_takes(check, ("key", "value", "conn"), f"the check of {name!r}")
        if current is not None:
            check_plain(current, f"the `current` of {name!r}")
            check_takes(current, ("key", "conn"), f"the `current` of {name!r}")
        if (
            isinstance(internal, str)
            or not isinstance(internal, Collection)
            or not all(isinstance(one, str) for one in internal)
        ):
            example = internal if isinstance(internal, str) else "password"
            raise ConfigurationError(
                f"the stream {name!r} is declared with internal={internal!r}: give a "
                f"set of names, as in {{{example!r}}}"
            )
        # Not before there is a type to read: it loads pydantic.
        from jobs_lib.schemas.codec import make_encoder

        encoder = make_encoder(
            name, value, schema, self._stream_registry, self._name_stream
        )
        named = frozenset(internal) | ({key} if key else frozenset())
        _check_fields(name, value, named)
        stream: Stream[V] = Stream(
            name,
            encoder=encoder,
            partitions=partitions or partitions_for(entities or 0),
            config=config or {},
            rules=Rules(_ACKS[acks], key, frozenset(internal), check, current),
            settings=self._stream_settings,
            publishing=self._find_publishing,
        )
        self.streams[name] = stream
        return stream

    def close_streams(self) -> None:
        """Wait for the events that are under way, and close the clients of Kafka.

        The next publish opens them again.
        """
        with self._makes_publishing:
            found, self._publishing = self._publishing, None
        if found is not None:
            found.close()

    def _name_stream(self, name: str) -> str:
        return name_in_kafka(self._stream_settings(), name)

    def _find_publishing(self) -> Publishing:
        """Made once, at the first publish: it loads Kafka's client."""
        found = self._publishing
        if found is None:
            from jobs_lib.streams.publishing import Publishing

            with self._makes_publishing:
                found = self._publishing
                if found is None:
                    found = self._publishing = Publishing(
                        self._stream_settings(),
                        self._connections,
                        self._find_queries,
                        self._find_groups,
                        max(stream.largest for stream in self.streams.values()),
                    )
        return found

    def _find_groups(self, topic: str) -> list[str]:
        return [one.group for one in self._readers if one.topic == topic]


def _check_fields(name: str, value: Any, named: frozenset[str]) -> None:
    """Refuse names of fields that the type of the values does not have."""
    if not named:
        return
    from jobs_lib.schemas.codec import list_fields

    fields = list_fields(value)
    if fields is not None and (unknown := sorted(named - fields)):
        raise ConfigurationError(
            f"the values of the stream {name!r} have no field "
            f"{', '.join(map(repr, unknown))}: they have {', '.join(sorted(fields))}"
        )
