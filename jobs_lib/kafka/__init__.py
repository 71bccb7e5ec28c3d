"""Kafka: clients with safe settings, and membership in a group."""

from __future__ import annotations
