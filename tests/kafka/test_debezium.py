"""A foreign relay reads the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka.admin import AdminClient

from benchmarks.connect import DebeziumError
from benchmarks.relay.debezium.connect import connecting, install
from benchmarks.relay.stage import Stage
from tests.support.apps import make_app, running
from tests.support.records import read_topic

if TYPE_CHECKING:
    import psycopg

KEYS = ["a", "b", "c"]
COUNT = 60


@dataclass
class Server:
    """The database of a test, in the form that a stage needs."""

    url: str
    admin: psycopg.Connection

    def ask(self, query: str) -> Any:
        """The first column of the first row."""
        row = self.admin.execute(query).fetchone()
        return row and row[0]


@pytest.fixture
def stage(database_url, admin, kafka_broker, topic):
    """A database and a topic; skipped if Debezium cannot be installed."""
    try:
        install()
    except DebeziumError as error:
        pytest.skip(f"no Debezium: {error}")
    server = cast("Any", Server(database_url, admin))
    client = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    return Stage(server, kafka_broker, client, topic(4))


@pytest.mark.slow
@pytest.mark.guarantee("W7")
def test_the_outbox_is_relayed_by_debezium_or_by_a_thread_of_the_service(
    stage, admin, connect, bootstrap_servers, wait_for
):
    app = make_app(stage.server.url, kafka_bootstrap_servers=bootstrap_servers)
    events = app.topic(stage.topic, value=dict[str, int], partitions=4)
    expected: dict[str, list[int]] = {key: [] for key in KEYS}

    def found() -> dict[str, list[int]]:
        by_key: dict[str, list[int]] = {}
        for record in read_topic(bootstrap_servers, stage.topic):
            assert record.headers["ce_version"] == str(record.json["n"])
            by_key.setdefault(record.key, []).append(record.json["n"])
        return by_key

    with connecting(stage):
        for n in range(COUNT):
            key = KEYS[n % len(KEYS)]
            with connect() as connection:
                events.send(connection, key=key, value={"n": n}, version=n)
                if n % 5 == 0:
                    connection.rollback()
                else:
                    expected[key].append(n)
        wait_for(
            lambda: sum(map(len, found().values())) == sum(map(len, expected.values())),
            timeout=60,
            what="Debezium has sent all",
        )
        assert found() == expected
    # Debezium deletes nothing: the rows stay for the next relay.
    with running(app, "relay"):
        wait_for(
            lambda: admin.execute("select from jobs_lib.outbox").rowcount == 0,
            what="the outbox is empty",
        )
    assert found() == {key: 2 * versions for key, versions in expected.items()}
