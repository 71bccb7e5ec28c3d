"""Write rows in the caller's transaction; relay them to Kafka, in order per key."""

from __future__ import annotations
