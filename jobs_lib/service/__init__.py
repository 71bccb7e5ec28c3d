"""A running process: it starts its parts, and stops them."""

from __future__ import annotations
