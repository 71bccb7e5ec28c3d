"""Records as Kafka's client gives them, for tests without a broker."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Header = tuple[str, bytes | None]


class FakeRecord:
    """What Kafka's client gives of a record, as far as the library asks for it.

    Args:
        offset: of the record.
        topic: its topic.
        partition: its partition.
        key: in bytes.
        value: in bytes.
        headers: by name, in their order; a name may come again.
        size: the bytes that it counts for.
    """

    def __init__(
        self,
        offset: int,
        *,
        topic: str = "topic",
        partition: int = 0,
        key: bytes | None = b"k",
        value: bytes | None = None,
        headers: Iterable[Header] = (),
        size: int = 1,
    ) -> None:
        self.asked: Counter[str] = Counter()
        """How often it was asked for what is dear."""
        self._place = topic, partition, offset
        self._key, self._value = key, value
        self._headers = [*headers]
        self._size = size

    def topic(self) -> str:
        """Its topic."""
        return self._place[0]

    def partition(self) -> int:
        """Its partition."""
        return self._place[1]

    def offset(self) -> int:
        """Its offset."""
        return self._place[2]

    def key(self) -> bytes | None:
        """Its key."""
        return self._key

    def value(self) -> bytes | None:
        """Its value."""
        return self._value

    def headers(self) -> list[Header] | None:
        """Its headers; None if it has none."""
        self.asked["headers"] += 1
        return self._headers or None

    def timestamp(self) -> tuple[int, int]:
        """The kind of its time, and a second after the epoch."""
        self.asked["timestamp"] += 1
        return 1, 1_000

    def __len__(self) -> int:
        """Return its bytes."""
        return self._size


def fake_record(offset: int, **options: Any) -> Any:
    """Make a record, of a type that tests may give to the library."""
    return FakeRecord(offset, **options)
