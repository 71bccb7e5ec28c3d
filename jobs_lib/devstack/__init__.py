"""Real PostgreSQL and Kafka servers for development and tests, without Docker."""

from __future__ import annotations

from jobs_lib.devstack.java import Java, find_java
from jobs_lib.devstack.kafka import FAST_JVM, SMALL_JVM, KafkaBroker
from jobs_lib.devstack.postgres import PostgresServer, installed_postgres
from jobs_lib.devstack.stack import DevStack, Service

__all__ = [
    "FAST_JVM",
    "SMALL_JVM",
    "DevStack",
    "Java",
    "KafkaBroker",
    "PostgresServer",
    "Service",
    "find_java",
    "installed_postgres",
]
