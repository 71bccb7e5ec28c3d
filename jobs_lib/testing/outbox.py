"""The records that a test's code has written to the outbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.kafka.checks import check_version
from jobs_lib.outbox.topic import Gone, Topic, read_version
from jobs_lib.schemas.codec import show_json

if TYPE_CHECKING:
    from jobs_lib.testing.jobs import Jobs

_ANY = object()
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A record on its way to a topic."""

    topic: str
    key: str | None
    value: Any
    """Parsed from JSON, or read as Avro if the topic has a schema; other bytes stay
    bytes; None for a tombstone. For an id-only row, the state that the entity has
    now."""
    version: int | None
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.topic} key={self.key!r} value={self.value!r}"


class Outbox:
    """The committed rows of the outbox: no relay and no broker is needed."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def sent(
        self, topic: Topic[Any] | str | None = None, /, *, key: Any = _ANY
    ) -> list[Sent]:
        """The records in the order of writing: all, or those of a topic or key."""
        name = topic.name if isinstance(topic, Topic) else topic
        return [
            one
            for one in self._list()
            if (name is None or one.topic == name) and (key is _ANY or one.key == key)
        ]

    def assert_sent(
        self, topic: Topic[Any] | str, /, *, key: Any = _ANY, value: Any = _ANY
    ) -> Sent:
        """Fail unless such a record was written; the last one.

        Args:
            topic: what ``app.topic`` returned, or a name.
            key: its key. Defaults to any.
            value: the whole value, as ``send`` takes it; with a topic's name, as JSON
                holds it. Defaults to any.
        """
        __tracebackhide__ = True
        found = self._find(topic, key, value)
        if not found:
            raise AssertionError(
                f"nothing was sent to {_describe(topic, key, value)}; "
                f"{_list_up(self.sent())}\n(only what is committed can be seen)"
            )
        return found[-1]

    def assert_not_sent(
        self, topic: Topic[Any] | str, /, *, key: Any = _ANY, value: Any = _ANY
    ) -> None:
        """Fail if such a record was written."""
        __tracebackhide__ = True
        if found := self._find(topic, key, value):
            raise AssertionError(
                f"nothing should be sent to {_describe(topic, key, value)}, but "
                f"{_list_up(found)}"
            )

    def _find(self, topic: Topic[Any] | str, key: Any, value: Any) -> list[Sent]:
        if isinstance(topic, Topic) and value is not _ANY and value is not None:
            value = self._parse(topic.name, topic.encode(value))
        return [
            one
            for one in self.sent(topic, key=key)
            if value is _ANY or one.value == value
        ]

    def _list(self) -> list[Sent]:
        found = []
        for topic, key, value, version, headers, entity in self._jobs.query(
            "kit_outbox"
        ):
            if entity is not None:
                value, version = self._load(entity, key, version)
            parsed = self._parse(topic, value)
            found.append(Sent(topic, key, parsed, version, headers or {}))
        return found

    def _load(
        self, name: str, key: str, version: int | None
    ) -> tuple[bytes | None, int | None]:
        """The state that the relay would send for an id-only row now; its version."""
        entity = self._jobs.app.entities[name]
        with self._jobs.transaction() as conn:
            state = entity.load_states(conn, [key]).get(key)
        if state is None:
            return None, version
        gone = isinstance(state, Gone)
        version = state.version if gone else read_version(state)
        check_version(entity.topic, version)
        return None if gone else entity.topic.encode(state), version

    def _parse(self, topic: str, value: bytes | None) -> Any:
        if value is None:
            return None
        for declared in self._jobs.app.topics.values():
            if declared.name == topic:
                return declared.encoder.show(bytes(value))
        return show_json(bytes(value))


def _describe(topic: Topic[Any] | str, key: Any, value: Any) -> str:
    text = repr(topic.name if isinstance(topic, Topic) else topic)
    if key is not _ANY:
        text += f" with the key {key!r}"
    return text if value is _ANY else f"{text} with the value {value!r}"


def _list_up(found: list[Sent]) -> str:
    if not found:
        return "nothing was sent at all"
    shown = [str(one) for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    return "sent were\n  " + "\n  ".join(shown)
