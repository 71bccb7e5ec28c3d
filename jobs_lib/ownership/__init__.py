"""Which process owns which origins: sources decide, and the fence enforces it."""

from __future__ import annotations

from jobs_lib.ownership.database import DatabaseSource, choose_owner, share_evenly
from jobs_lib.ownership.ownership import Holder, Ownership
from jobs_lib.ownership.process import Process
from jobs_lib.ownership.source import Source
from jobs_lib.ownership.static import StaticSource

__all__ = [
    "DatabaseSource",
    "Holder",
    "Ownership",
    "Process",
    "Source",
    "StaticSource",
    "choose_owner",
    "share_evenly",
]
