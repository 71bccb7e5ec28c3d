"""Kafka's side: clients that are set up right, and membership in a group."""

from __future__ import annotations
