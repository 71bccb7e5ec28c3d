"""Two services with real flights: see README.md."""

from __future__ import annotations
