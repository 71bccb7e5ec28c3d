"""A service with a read model, for commands that run as processes of their own.

`MODEL` in the environment is JSON: the settings of the app, the `topic`, the database's
`url`, the `versions` of the read model, and `dies_at` as for the kinds of processes.
`slow_until` is a file: as long as it is not there, each record takes 20 ms. `tells`
lets a row in `told` show each change.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from tests.support.apps import make_app
from tests.support.processes.kinds import die_at

if TYPE_CHECKING:
    from jobs_lib import Record

_given: dict[str, Any] = json.loads(os.environ["MODEL"])
die_at(_given.pop("dies_at", {}))
_topic = _given.pop("topic")
_slow_until = _given.pop("slow_until", None)
_tells = _given.pop("tells", False)
_versions = _given.pop("versions", [1])

app = make_app(_given.pop("url"), **_given)


def tell(records: list[Record[dict[str, Any]]], conn: Any) -> None:
    """Note what has changed."""
    for record in records:
        conn.execute("insert into told values (%s)", (record.key,))


@app.read_model(
    _topic, table="model", key="id", group=_topic, on_change=tell if _tells else None
)
def model(record: Record[dict[str, Any]]) -> dict[str, Any]:
    """Keep two fields of each state."""
    if _slow_until is not None and not os.path.exists(_slow_until):
        time.sleep(0.02)
    return {"n": record.value["n"], "twice": 2 * record.value["n"]}


if 2 in _versions:

    @app.read_model(_topic, table="model", key="id", group=_topic, version=2)
    def model_2(record: Record[dict[str, Any]]) -> dict[str, Any]:
        """Keep others."""
        return {"n": record.value["n"], "thrice": 3 * record.value["n"]}
