"""Where the type of a record stands, by which it finds its handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.consuming.handler import refuse_value
from jobs_lib.consuming.record import describe, read_header
from jobs_lib.errors import ConfigurationError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from jobs_lib.schemas.codec import Decoder


@dataclass(frozen=True, slots=True)
class TypePlace:
    """A header, or a field of the value."""

    name: str
    is_field: bool = False

    def __str__(self) -> str:
        return f"its {'field' if self.is_field else 'header'} {self.name}"

    def read(self, message: Message, decoder: Decoder) -> str | None:
        """Read the type of a record; None if it has none there.

        Args:
            message: the record.
            decoder: of the values, whichever type they have.

        Raises:
            RecordError: the value cannot be read.
        """
        if not self.is_field:
            return read_header(message, self.name)
        value = message.value()
        if value is None:
            return None
        try:
            found = decoder.read_field(value, self.name)
        except ValueError as error:
            raise refuse_value(message, error) from None
        return found if isinstance(found, str) else None

    def refuse(
        self, message: Message, type_: str | None, group: str, known: Iterable[object]
    ) -> RecordError:
        """Make the error for a record that no handler takes.

        A header's text is shown: it is no value. A field's text is left out.
        """
        has = f"has the type {type_!r} in {self}"
        if type_ is None:
            has = f"has no type in {self}"
        elif self.is_field:
            has = f"has another type in {self}"
        return RecordError(
            f"the record at {describe(message)} {has}, and the group {group!r} handles "
            f"{', '.join(map(repr, known))}: declare a consumer for it"
        )


CE_TYPE = TypePlace("ce_type")
"""Where the relay writes the type."""


def choose_place(header: object, field: object, what: str) -> TypePlace:
    """Choose where the type stands.

    Args:
        header: the name of a header, if given.
        field: the name of a field of the value, if given.
        what: the declaration, for messages.

    Raises:
        ConfigurationError: both are given, or one is no name.
    """
    if header is not None and field is not None:
        raise ConfigurationError(
            f"{what} is given type_header={header!r} and type_field={field!r}: the "
            "type stands in one place, so give one of them"
        )
    for name, given in (("type_header", header), ("type_field", field)):
        if given is None:
            continue
        if not isinstance(given, str) or not given:
            raise ConfigurationError(
                f"the {name} of {what} is {given!r}: give its name, a str"
            )
        return TypePlace(given, is_field=name == "type_field")
    return CE_TYPE
