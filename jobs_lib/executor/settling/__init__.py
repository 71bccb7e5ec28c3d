"""Write what became of jobs."""

from __future__ import annotations
