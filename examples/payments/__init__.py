"""Services that wait for each other, on real data: see README.md."""

from __future__ import annotations
