"""Kafka as the source of truth: streams, and the events that are published to them."""
