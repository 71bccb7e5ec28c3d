"""The relay: from the outbox to Kafka."""
