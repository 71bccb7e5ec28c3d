"""The owner of all flights, as a service that is started by `jobs-lib run`.

`OWNER` in the environment is JSON: the settings of the app, the `topic`, and the
database's `url`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from tests.support.apps import make_app

_given: dict[str, Any] = json.loads(os.environ["OWNER"])
_topic, _partitions = _given.pop("topic"), _given.pop("partitions")
app = make_app(_given.pop("url"), **_given)


@dataclass(frozen=True)
class Flight:
    """The state of a flight."""

    n: int
    version: int


flights = app.topic(_topic, value=Flight, compacted=True, partitions=_partitions)


@app.entity(flights, source="source", key="id")
def load_flights(conn: Any, keys: list[str]) -> dict[str, Flight]:
    """Read the current states."""
    rows = conn.execute(
        "select id, n, version from source where id = any (%s)", (keys,)
    )
    return {key: Flight(n, version) for key, n, version in rows}
