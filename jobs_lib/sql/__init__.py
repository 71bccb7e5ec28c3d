"""Every statement that runs against the tables; see :class:`jobs_lib.db.Queries`."""

from __future__ import annotations
