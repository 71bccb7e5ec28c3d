"""Things that tests share, besides fixtures."""

from __future__ import annotations

from tests.support.topics import create_topic, delete_topics
from tests.support.waiting import wait_for
from tests.support.worker import Worker

__all__ = ["Worker", "create_topic", "delete_topics", "wait_for"]
