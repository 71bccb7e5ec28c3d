"""Decides which jobs are claimed next; sends nothing itself."""

from __future__ import annotations
