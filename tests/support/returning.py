"""A client of a broker that has just come back, and knows no leader yet."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException


class Returning:
    """Passes all on to a client, but for its first questions for a partition's range.

    Args:
        client: asks Kafka.
        code: of the error that it raises instead.
        errors: so many times.
    """

    def __init__(self, client: Any, code: int, errors: int) -> None:
        self._client = client
        self._code = code
        self._errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_watermark_offsets(self, *args: Any, **options: Any) -> Any:
        """Ask for the oldest offset of a partition and its end."""
        self._errors -= 1
        if self._errors >= 0:
            raise KafkaException(KafkaError(self._code))
        return self._client.get_watermark_offsets(*args, **options)
