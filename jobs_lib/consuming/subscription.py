"""What a consumer does with a block of records, as declared by its decorator."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from jobs_lib.consuming.handler import Handler, refuse_value
from jobs_lib.consuming.routing import CE_TYPE, TypePlace
from jobs_lib.consuming.versions import Version, name_table
from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.dependencies import Dependency
from jobs_lib.naming import Exact, name_done, name_in_kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    # Only for types: declaring consumers must not import either of the two.
    import psycopg
    from confluent_kafka import Message

    from jobs_lib.consuming.placing import Placing
    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.consuming.table_faults import ModelTable
    from jobs_lib.schemas.codec import Decoder
    from jobs_lib.settings import Settings

    Connection = psycopg.Connection[Any]

After: TypeAlias = "tuple[tuple[str | Exact, str | Exact], ...]"
"""Pairs of a topic and a group, as declared."""
OnGap: TypeAlias = Literal["stop", "skip"]
OnError: TypeAlias = Literal["stop", "skip"]


class BlockError(Exception):
    """A record of a block cannot be applied.

    Attributes:
        index: of the record in the block; None if that is not known.
        error: says why.
    """

    def __init__(self, index: int | None, error: BaseException) -> None:
        super().__init__(index, error)
        self.index = index
        self.error = error


class Telling(NamedTuple):
    """What is committed for ``<group>.done``; handlers of one topic say it alike."""

    done: bool | Literal["sent"] = False
    """Whether anything is; if ``"sent"``, a record is done only when what it has led to
    is in Kafka, too."""
    derived_from: tuple[str | Exact, str | Exact] | None = None
    """The topic that the records are made of, and the group that makes them."""


class Subscription:
    """One topic, read by one group."""

    def __init__(
        self, topic: str | Exact, group: str | Exact, settings: Callable[[], Settings]
    ) -> None:
        self._topic = topic
        self._group = group
        self._settings = settings
        self.model: ReadModel | None = None
        self.tables: list[ModelTable] = []
        """The tables of a read model, by the names that they have now."""
        self.plain_tables: list[str] = []
        """The same by the names that readers know."""
        self.version = Version(1, group, is_said=False)
        self.is_current = True
        """Whether readers see this version of a read model."""
        self.on_gap: OnGap = "stop"
        """What to do where records are gone."""
        self.on_error: OnError = "stop"
        """What to do with a record that cannot be read or handled."""
        self._all_repeatable = True
        self.leaves_to: str | None = None
        """The group, by its name in Kafka, that tells what the records change: those
        that it has yet to read are left to it. None if nobody is to be told."""
        self.type_place = CE_TYPE
        """Where the type of a record stands."""
        self.block: int | None = None
        """The most records of a block; None as the settings say."""
        self.block_seconds: float | None = None
        """A block ends after so many seconds; None as the settings say."""
        self._after: After = ()
        self._telling = Telling()
        self._opened = 0
        self._handlers: dict[str | None, Handler] = {}
        self._decoder: Decoder | None = None
        """The decoder for the model."""

    @cached_property
    def topic(self) -> str:
        """The topic's name in Kafka."""
        return name_in_kafka(self._settings(), self._topic)

    @cached_property
    def group(self) -> str:
        """The group's name in Kafka."""
        return name_in_kafka(self._settings(), self._group)

    @property
    def done(self) -> bool:
        """Whether it tells how far its records are done."""
        return bool(self._telling.done)

    @property
    def waits_for_relay(self) -> bool:
        """Whether a record is done only when what it has led to is in Kafka."""
        return self._telling.done == "sent"

    @cached_property
    def derived_from(self) -> Dependency | None:
        """The topic that its records are made of, and the group that makes them."""
        pair = self._telling.derived_from
        if pair is None:
            return None
        settings = self._settings()
        return Dependency(*(name_in_kafka(settings, name) for name in pair))

    @property
    def told_topics(self) -> tuple[str, ...]:
        """The topics for which offsets are committed for the group ``<group>.done``."""
        if not self.done:
            return ()
        derived = self.derived_from
        return (self.topic,) if derived is None else (self.topic, derived.topic)

    @property
    def done_group(self) -> str:
        """The name in Kafka of the group that tells how far its jobs are done."""
        return name_done(self._settings(), self.group)

    @cached_property
    def after(self) -> tuple[Dependency, ...]:
        """The groups that must have handled a record first, by the names in Kafka."""
        settings = self._settings()
        return tuple(
            Dependency(*(name_in_kafka(settings, name) for name in pair))
            for pair in self._after
        )

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        """The groups whose offsets it needs to know, and the topics that they read."""
        return (
            self.after
            if self.derived_from is None
            else (*self.after, self.derived_from)
        )

    @cached_property
    def first_group(self) -> str:
        """The name in Kafka of the group of the read model's first version."""
        return name_in_kafka(self._settings(), self.version.group)

    def is_of(self, topic: str | Exact, group: str | Exact) -> bool:
        """Whether it was declared with this topic and this group."""
        return (self._topic, self._group) == (topic, group)

    def is_called(self, topic: str) -> bool:
        """Whether its topic has this name, as it is declared or as Kafka has it."""
        return topic in (self.topic, str(self._topic))

    def is_group(self, group: str) -> bool:
        """Whether its group has this name, likewise."""
        return group in (self.group, str(self._group))

    def is_of_exact_topic(self, name: str) -> bool:
        """Whether it reads another system's topic of this name."""
        return self._topic == Exact(name)

    def agree(
        self,
        type_place: TypePlace,
        block: int | None,
        block_seconds: float | None,
        telling: Telling,
        after: After = (),
    ) -> None:
        """Note what all handlers of the partitions say alike.

        Raises:
            ConfigurationError: a handler that is there already says something else.
        """
        before = self._telling
        self._refuse_other("place of the type", self.type_place, type_place)
        self._refuse_other("block", self.block, block)
        self._refuse_other("block_seconds", self.block_seconds, block_seconds)
        self._refuse_other("after", self._after, after)
        self._refuse_other("done", before.done, telling.done)
        self._refuse_other("derived_from", before.derived_from, telling.derived_from)
        self.type_place = type_place
        self.block, self.block_seconds = block, block_seconds
        self._after = after
        self._telling = telling

    def _refuse_other(self, name: str, before: object, now: object) -> None:
        """Refuse what a handler says otherwise than those that are there already."""
        if self._handlers and before != now:
            texts = [
                str(one) if isinstance(one, TypePlace) else repr(one)
                for one in (before, now)
            ]
            raise ConfigurationError(
                f"the handlers of {self._topic!r} in the group {self._group!r} share "
                f"its partitions: give them the same {name}, not {' and '.join(texts)}"
            )

    def add_handler(
        self,
        handler: Handler,
        type_: str | None,
        on_gap: OnGap = "stop",
        on_error: OnError = "stop",
        repeatable: bool = False,
    ) -> None:
        """Handle the records of one type, or of every type, with ``handler``.

        Raises:
            ConfigurationError: these records have a handler already, or one of another
                type says something else of gaps or of errors.
        """
        if type_ in self._handlers or self.model:
            raise ConfigurationError(
                f"the records of {self._topic!r} in the group {self._group!r} have a "
                f"handler already (type {type_!r})"
            )
        check_words(on_gap=on_gap, on_error=on_error)
        self._refuse_other("on_gap", self.on_gap, on_gap)
        self._refuse_other("on_error", self.on_error, on_error)
        if not isinstance(repeatable, bool):
            raise ConfigurationError(f"repeatable is True or False, not {repeatable!r}")
        self.on_gap = on_gap
        self.on_error = on_error
        self._all_repeatable &= repeatable
        self._handlers[type_] = handler

    def set_model(
        self,
        model: ReadModel,
        decoder: Decoder,
        on_error: OnError = "stop",
        after: After = (),
        telling: Telling | None = None,
    ) -> None:
        """Keep a table with ``model``, which reads values with ``decoder``.

        Raises:
            ConfigurationError: the records have a handler already, or ``on_error`` is
                none of its words.
        """
        if self._handlers or self.model:
            raise ConfigurationError(
                f"the records of {self._topic!r} in the group {self._group!r} have a "
                "handler already"
            )
        check_words(on_error=on_error)
        self.on_error = on_error
        self._after = after
        self._telling = telling or self._telling
        self.model = model
        self._decoder = decoder

    def set_tables(self, tables: Iterable[ModelTable], version: Version) -> None:
        """Note the tables of the read model, and which version of them it keeps."""
        self.tables = [*tables]
        self.plain_tables = [one.name for one in self.tables]
        self.version = version

    @property
    def first_table(self) -> str:
        """The read model's first table, by the name that readers know."""
        return self.plain_tables[0]

    def place(self, current: int) -> None:
        """Give the tables the names that they have while this version is current."""
        assert self.model is not None
        self.is_current = current == self.version.number
        places = {
            name: name if self.is_current else name_table(name, self.version.number)
            for name in self.plain_tables
        }
        self.model.place(places)
        self.tables = [
            one._replace(name=place)
            for one, place in zip(self.tables, places.values(), strict=True)
        ]

    def make_again(self, group: str) -> Subscription:
        """The same read model without effects elsewhere, kept by another group.

        Args:
            group: by its name in Kafka, which the environment's template leaves alone.
        """
        assert self.model is not None
        other = Subscription(self._topic, self._group, self._settings)
        other.group = group
        other.model = self.model.make_anew()
        if self.has_effects or self.model.gapless:
            other.leaves_to = self.group
        other._decoder = self._decoder
        other.on_error = self.on_error
        # It begins with what there is.
        other.on_gap = "skip"
        other._after = self._after
        other.block, other.block_seconds = self.block, self.block_seconds
        other.tables, other.plain_tables = self.tables, self.plain_tables
        other.version, other.is_current = self.version, self.is_current
        return other

    @property
    def is_read_model(self) -> bool:
        """Whether the records fill a table, by versions."""
        return self.model is not None

    @property
    def is_again(self) -> bool:
        """Whether it re-synchronises a read model, beside the group that keeps it."""
        return self.model is not None and self.model.again

    @property
    def has_effects(self) -> bool:
        """Whether it is a read model that calls a function with what has changed."""
        return self.model is not None and self.model.on_change is not None

    @property
    def ends_in_time(self) -> bool:
        """Whether a block may end after any of its records, once its time is over."""
        return self.model is None and all(
            handler.per == "record" for handler in self._handlers.values()
        )

    @property
    def timeout(self) -> float:
        """The seconds that a call with a whole block may take; infinite if any."""
        limits = [
            handler.timeout
            for handler in self._handlers.values()
            if handler.per == "block" and handler.timeout is not None
        ]
        return min(limits, default=math.inf)

    @property
    def reads_ahead(self) -> bool:
        """Whether a block can be read without a question to the database or another."""
        return self.model is not None and not any(one.asks for one in self._decoders)

    @property
    def is_repeatable(self) -> bool:
        """Whether a replay may apply records once more that were applied before.

        Rows with versions do not mind; a handler must declare it, and so must all that
        share the topic and group.
        """
        return self.is_read_model or self._all_repeatable

    def may_pass(self, stored: int, start: int, policy: str | None = None) -> bool:
        """Whether to go on at ``start``, where the records from ``stored`` are gone.

        A read model may: a compacted topic keeps the newest record of each key, and
        rows with versions do not mind to see one twice.

        Args:
            stored: the offset to go on from.
            start: the offset of the oldest record.
            policy: how the topic of a read model is cleaned up; None if Kafka does not
                say, or if nothing lies before the start.
        """
        if self.on_gap == "skip" and stored < start:
            return True
        return self.is_read_model and (policy is None or "compact" in policy)

    def open(self) -> None:
        """Start what the handlers need; :meth:`close` ends it."""
        handlers = [*self._handlers.values()]
        if self.model is not None and self.model.on_change is not None:
            handlers.append(self.model.on_change)
        if any(handler.is_async for handler in handlers):
            # Not before: it loads asyncio.
            from jobs_lib.consuming.handler_loop import HANDLER_LOOP

            HANDLER_LOOP.open()
            self._opened += 1

    def close(self) -> None:
        """End it; async handlers that still run are cancelled."""
        if self._opened:
            self._opened -= 1
            from jobs_lib.consuming.handler_loop import HANDLER_LOOP

            HANDLER_LOOP.close()

    def load(self) -> None:
        """Check that all settings that the decoders need are set.

        Raises:
            ConfigurationError: one is missing.
        """
        for decoder in self._decoders:
            decoder.load()

    def prepare(self, messages: Sequence[Message]) -> None:
        """Fetch what is needed to read a block, before its transaction begins.

        Raises:
            RecordError: a record cannot be read.
            UnavailableError: a server that must be asked does not answer.
        """
        if not any(decoder.asks for decoder in self._decoders):
            return
        for message in messages:
            if (value := message.value()) is not None:
                decoder = self._decoder or self._choose(message).decoder
                try:
                    decoder.prepare(value)
                except ValueError as error:
                    raise refuse_value(message, error) from None

    def apply(
        self,
        connection: Connection,
        messages: Sequence[Message],
        may_go_on: Callable[[], bool],
        highest: int | None = None,
        placing: Placing | None = None,
        skipped: AbstractSet[int] = frozenset(),
    ) -> int:
        """Handle a block of one partition, in order, in the open transaction.

        Args:
            connection: with the transaction of the block.
            messages: the records of the block.
            may_go_on: asked after each call; if it returns False, the block ends.
            highest: the highest offset to go on from that the partition ever had.
            placing: gives jobs the places of the records; None for none.
            skipped: offsets of records that were skipped: they were never handled.

        Returns the number of records that were applied.

        Raises:
            BlockError: a record cannot be applied.
        """
        done = 0
        while done < len(messages):
            done = self._apply_next(
                connection, messages, done, highest, placing, skipped
            )
            if not may_go_on():
                break
        return done

    def _apply_next(
        self,
        connection: Connection,
        messages: Sequence[Message],
        start: int,
        highest: int | None,
        placing: Placing | None,
        skipped: AbstractSet[int],
    ) -> int:
        """Call the handler of the record at ``start``; returns where to go on.

        One that is called per block gets the records that follow, too, until one has
        another handler.
        """
        at: int | None = start
        try:
            handler = self._choose(messages[start])
            message = messages[start]
            # A record that was skipped was never handled, so it does not come again.
            known = None if skipped and message.offset() in skipped else highest
            given: Any = handler.make_record(message, known)
            end = start + 1
            if handler.per == "block":
                given = [given]
                for message in messages[end:]:
                    at = end
                    if self._choose(message) is not handler:
                        break
                    known = None if skipped and message.offset() in skipped else highest
                    given.append(handler.make_record(message, known))
                    end += 1
                # Nobody knows which of them the function cannot handle.
                at = start if end == start + 1 else None
            handler.handle(connection, given, messages[start:end], self.group, placing)
        except BaseException as error:
            raise BlockError(at, error) from error
        return end

    @property
    def _decoders(self) -> list[Decoder]:
        if self._decoder is not None:
            return [self._decoder]
        return [handler.decoder for handler in self._handlers.values()]

    def _choose(self, message: Message) -> Handler:
        handlers = self._handlers
        if len(handlers) == 1 and None in handlers:
            return handlers[None]
        some = next(iter(handlers.values()))
        type_ = self.type_place.read(message, some.decoder)
        chosen = handlers.get(type_) or handlers.get(None)
        if chosen is None:
            raise self.type_place.refuse(message, type_, self.group, handlers)
        return chosen


def check_words(**given: object) -> None:
    """Refuse another word for what to do where records are gone or fail.

    Args:
        given: the arguments, by their names.

    Raises:
        ConfigurationError: one is something else than ``"stop"`` and ``"skip"``.
    """
    for name, word in given.items():
        if word not in ("stop", "skip"):
            raise ConfigurationError(f"{name} is 'stop' or 'skip', not {word!r}")
