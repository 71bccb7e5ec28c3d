"""Tenants: a service whose source of truth is a topic in Kafka."""
