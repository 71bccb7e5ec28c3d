"""Debezium in Kafka Connect, which relays the same outbox: the relay's peer."""
