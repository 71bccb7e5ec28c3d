"""Limit how many jobs of a type run at once, over all pods."""

from __future__ import annotations
