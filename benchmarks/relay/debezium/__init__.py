"""Debezium in Kafka Connect: the relay's peer, which relays the same outbox."""
