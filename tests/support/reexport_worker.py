"""A pod that exports items: executor and relay in a process of their own."""

from __future__ import annotations

import logging
import sys
from typing import Any

from jobs_lib.service.service import Service
from tests.support.apps import make_app

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, bootstrap_servers, topic = sys.argv[1:]
    app = make_app(url, kafka_bootstrap_servers=bootstrap_servers)
    items = app.topic(topic, compacted=True)

    @app.entity(items, source="items", key="id")
    def load_items(connection: Any, keys: list[str]) -> dict[str, Any]:
        rows = connection.execute(
            "select id, name, version from items where id = any (%s::int[])",
            ([*map(int, keys)],),
        )
        return {str(i): {"id": i, "name": n, "version": v} for i, n, v in rows}

    Service(app, ["executor", "relay"]).run()
