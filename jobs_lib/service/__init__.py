"""A running process: its parts, put together and taken apart."""

from __future__ import annotations
