"""Two services on real flights: see README.md."""

from __future__ import annotations
