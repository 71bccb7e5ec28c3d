"""Examples that you can run without changes."""

from __future__ import annotations
