"""Jobs and a transactional outbox on PostgreSQL, for services that talk over Kafka."""

from __future__ import annotations

__version__ = "0.1.0"
