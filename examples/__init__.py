"""Examples that run as they are."""

from __future__ import annotations
