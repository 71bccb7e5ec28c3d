"""The library meets faults of servers, connections, processes and handlers."""

from __future__ import annotations
