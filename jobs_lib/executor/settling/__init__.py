"""Write the outcomes of jobs."""

from __future__ import annotations
