"""Debezium's JDBC sink in Kafka Connect: a peer of read models."""
