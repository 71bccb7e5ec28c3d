"""Every statement that runs against the tables.

:class:`jobs_lib.postgres.queries.Queries` reads them.
"""

from __future__ import annotations
