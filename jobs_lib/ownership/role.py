"""The role in which executors own origins."""

from __future__ import annotations

EXECUTE = "execute"
"""The role of the first app on the tables; other apps have ``execute:<name>``."""
