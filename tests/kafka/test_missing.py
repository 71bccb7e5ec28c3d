"""A read model whose versions have no gaps tells of a record that was lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.apps import heard, make_app, running
from tests.support.records import make_producer


@pytest.mark.guarantee("W58")
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
@pytest.mark.parametrize("beside", [False, True], ids=["on the row", "beside"])
def test_a_version_that_never_came_is_told_once(
    admin, database_url, bootstrap_servers, topic, wait_for, block, beside
):
    admin.execute("create table state_rm (id text primary key, version bigint, n int)")
    name = topic(1)
    app = make_app(
        database_url, kafka_bootstrap_servers=bootstrap_servers, consumer_block=block
    )
    app.read_model(
        name,
        group="g",
        table="state_rm",
        key="id",
        versions="side" if beside else "row",
        gapless=True,
    )(lambda record: {"n": record.value})
    query = "select next_offset from jobs_lib.offsets"

    def send(*versions: int) -> None:
        producer = make_producer(bootstrap_servers)
        for version in versions:
            value = None if version == 3 else "1"
            headers: Any = {"ce_version": str(version)}
            producer.produce(name, key="k", value=value, headers=headers)
        assert producer.flush(30) == 0

    with heard("record.missing") as missing, running(app, "consumers"):
        send(2, 3, 4, 4, 2)
        wait_for(
            lambda: admin.execute(query).fetchone() == (5,), timeout=30, what="all in"
        )
        assert not missing
        send(7, 8)
        wait_for(lambda: missing, timeout=30, what="it is told")
        wait_for(
            lambda: admin.execute(query).fetchone() == (7,), timeout=30, what="all in"
        )
    ((_, fields),) = missing
    told = {key: fields[key] for key in ("offset", "count", "before", "after")}
    assert told == {"offset": 5, "count": 2, "before": 4, "after": 7}
