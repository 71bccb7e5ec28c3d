"""What the product is put through: servers, connections, processes, handlers."""

from __future__ import annotations
