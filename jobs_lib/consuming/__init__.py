"""Read topics: state and offset in one transaction."""

from __future__ import annotations
