"""PostgreSQL: connections, named queries, migrations, wake-ups."""

from __future__ import annotations
