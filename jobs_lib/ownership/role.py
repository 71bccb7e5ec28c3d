"""The role in which executors own origins."""

from __future__ import annotations

EXECUTE = "execute"
"""Of the first app on the tables; that of any other one is ``execute:<its name>``."""
