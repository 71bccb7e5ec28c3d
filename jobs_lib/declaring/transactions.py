"""Declare functions whose events Kafka commits with the offset of their record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from jobs_lib.consuming.keys import choose_reader
from jobs_lib.declaring.functions import check_plain, check_takes
from jobs_lib.declaring.names import check_name, check_topic_name
from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import Exact, plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import TypeForm

    from jobs_lib.consuming.record import Record
    from jobs_lib.consuming.transactional import Transactional
    from jobs_lib.declaring.handlers import K, V
    from jobs_lib.schemas.codec import SchemaSource
    from jobs_lib.schemas.registry import Registry
    from jobs_lib.settings import Settings
    from jobs_lib.streams.event import Event

    Make = Callable[[Record[V, K]], Event | Sequence[Event] | None]


class TransactionDeclarations:
    """The part of an app that declares what runs in transactions of Kafka.

    Args:
        settings: reads the settings, at the first use.
        registry: finds the schema registry, at the first use.
        transactionals: takes those that are declared.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        registry: Callable[[], Registry],
        transactionals: list[Transactional],
    ) -> None:
        self.transactionals = transactionals
        self._settings_of_transactions = settings
        self._registry_of_transactions = registry

    def transactional(
        self,
        topic: str | Exact,
        *,
        group: str | Exact,
        value: TypeForm[V] = Any,
        schema: SchemaSource | Literal["registered"] | None = None,
        key_type: type[K] = str,  # type: ignore[assignment]
    ) -> Callable[[Make[V, K]], Make[V, K]]:
        """Declare a function that makes events of records, each exactly once in Kafka.

        It gets a :class:`Record` and returns what ``stream.event(key, value)`` has
        made, a list of these, or None. Kafka commits them together with the group's
        offset. The function gets no connection: nothing that it does elsewhere is part
        of that transaction, and it may be called again.

        Args:
            topic: the topic to read, or ``Exact("their.topic")``.
            group: the consumer group, which nothing else may share.
            value: the type of the records' values. Defaults to whatever the JSON holds.
            schema: says that the values are Avro, as for :meth:`jobs_lib.App.consumer`.
            key_type: the type of the keys, as for :meth:`jobs_lib.App.consumer`.

        Raises:
            ConfigurationError: the arguments do not go together.
        """
        what = f"the transactional function of {topic!r} in the group {group!r}"
        check_topic_name(plain_name(topic))
        check_name(plain_name(group), "a consumer group")
        read_key = choose_reader(key_type, what)
        # Not before there is a type to read: they load pydantic.
        from jobs_lib.consuming.transactional import Transactional
        from jobs_lib.schemas.codec import make_decoder

        registry = self._registry_of_transactions
        decoder = make_decoder(plain_name(topic), value, schema, registry)

        def declare(function: Make[V, K]) -> Make[V, K]:
            check_plain(function, what)
            check_takes(function, ("record",), what)
            self.transactionals.append(
                Transactional(
                    topic,
                    group,
                    function,
                    decoder,
                    read_key,
                    self._settings_of_transactions,
                )
            )
            return function

        return declare


def check_apart(groups: Sequence[str], others: Sequence[str]) -> None:
    """Refuse a group of a transactional function that somebody else joins, too.

    Args:
        groups: of these functions, as named in Kafka.
        others: groups of consumers and read models, likewise.

    Raises:
        ConfigurationError: one is shared.
    """
    for group in groups:
        if group in others or groups.count(group) > 1:
            raise ConfigurationError(
                f"a transactional function shares the group {group!r} with another "
                "function, and their offsets are kept in two ways or their records are "
                "divided: give it a group of its own"
            )
