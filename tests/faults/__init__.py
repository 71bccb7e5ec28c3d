"""The product goes through faults of servers, connections, processes and handlers."""

from __future__ import annotations
