"""A service whose items are an entity: its table, its topic, and a read model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psycopg.rows import class_row

from jobs_lib import Gone, reexport
from tests.support.apps import count, make_app
from tests.support.records import read_committed, read_topic
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from jobs_lib import App
    from jobs_lib.outbox.topic import Topic
    from jobs_lib.reexport import Progress

COMPACTED = {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000"}
TABLES = """
create table items (
    id int primary key, name text, version bigint not null, deleted bool default false
);
create table item_rm (id int primary key, version bigint, name text);
"""


@dataclass
class Item:
    """The state of an item."""

    id: int
    name: str
    version: int


def declare_items(app: App, topic: Topic[Any], row: type[Any]) -> None:
    """Declare the table ``items`` as an entity.

    Args:
        app: the app.
        topic: of the states.
        row: a dataclass with the table's columns.
    """

    @app.entity(topic, source="items", key="id")
    def load_items(connection: Any, keys: list[str]) -> dict[str, Any]:
        with connection.cursor(row_factory=class_row(row)) as cursor:
            cursor.execute(
                "select * from items where id = any (%s::int[])", ([*map(int, keys)],)
            )
            return {str(item.id): item for item in cursor}


class Shop:
    """The service, and what a test asks of it."""

    def __init__(self, admin: Any, url: str, servers: str, topic: str) -> None:
        self.admin = admin
        self.servers = servers
        self.app: App = make_app(url, kafka_bootstrap_servers=servers)
        self.database = self.app.database()
        admin.execute(TABLES)
        self.topic = self.app.topic(topic, value=Item, compacted=True, partitions=4)
        self.entity = self._declare()

    def _declare(self) -> Any:
        @self.app.entity(self.topic, source="items", key="id")
        def load(connection: Any, keys: list[str]) -> dict[str, Item | Gone]:
            with connection.cursor(row_factory=class_row(Item)) as cursor:
                cursor.execute(
                    "select id, name, version from items"
                    " where id = any (%s::int[]) and not deleted",
                    ([*map(int, keys)],),
                )
                found: dict[str, Item | Gone] = {str(one.id): one for one in cursor}
            gone = connection.execute(
                "select id, version from items where id = any (%s::int[]) and deleted",
                ([*map(int, keys)],),
            )
            return found | {str(key): Gone(version) for key, version in gone}

        @self.app.read_model(
            self.topic.name,
            group=f"{self.topic.name}-g",
            table="item_rm",
            key="id",
            value=Item,
        )
        def item_rm(record: Any) -> dict[str, Any]:
            return {"name": record.value.name}

        return self.app.entities["items"]

    def fill(self, first: int, last: int) -> None:
        """Insert items into the table, without a record."""
        self.admin.execute(
            "insert into items select g, 'item ' || g, 1"
            " from generate_series(%s::int, %s::int) g",
            (first, last),
        )

    def read_newest(self, topic: str | None = None) -> dict[str, Any]:
        """A topic after compaction: the last record of each key with a value."""
        records = read_topic(self.servers, topic or self.topic.name)
        last = {one.key: one.json for one in records}
        return {key: value for key, value in last.items() if value is not None}

    def read_table(self) -> dict[str, Any]:
        """The states of the table."""
        rows = self.admin.execute(
            "select id, name, version from items where not deleted"
        ).fetchall()
        return {str(i): {"id": i, "name": n, "version": v} for i, n, v in rows}

    def await_end(self) -> Progress:
        """Wait until a re-export has ended, and no row waits in the outbox."""

        def look() -> Progress | None:
            progress = reexport.status(self.database, "items")
            return (
                progress if progress.ended and not count(self.admin, "outbox") else None
            )

        found = wait_for(
            look,
            timeout=90,
            what=lambda: f"all is sent: {reexport.status(self.database, 'items')}",
            # Each look makes a connection.
            every=0.05,
        )
        assert found is not None
        return found

    def change(self, connection: Any, item: int, number: int) -> None:
        """Rename, delete or insert an item, and send what has become of it."""
        (found,) = connection.execute(
            "select max(version) from items where id = %s", (item,)
        ).fetchone()
        if found is None:
            # A key that comes back goes on counting: its versions are the numbers.
            connection.execute(
                "insert into items values (%s, 'back', %s)", (item, 10 + number)
            )
            self.topic.send(
                connection, key=str(item), value=Item(item, "back", 10 + number)
            )
        elif number % 5:
            version = 10 + number
            name = f"renamed {number}"
            connection.execute(
                "update items set name = %s, version = %s where id = %s",
                (name, version, item),
            )
            self.topic.send(connection, key=str(item), value=Item(item, name, version))
        else:
            connection.execute("delete from items where id = %s", (item,))
            self.topic.tombstone(connection, key=str(item), version=10 + number)

    def await_records(self, wanted: int) -> None:
        """Wait until the read model has applied so many records, and says so."""
        group = f"{self.topic.name}-g"

        def look() -> bool:
            told = read_committed(self.servers, group, self.topic.name)
            return sum((told or {}).values()) >= wanted

        wait_for(
            look,
            timeout=90,
            what=f"the group has read {wanted} records",
            # Each look makes a client of Kafka.
            every=0.1,
        )

    def await_model(self) -> None:
        """Wait until the read model is equal to the table."""
        wait_for(
            lambda: not self.find_differences(),
            timeout=90,
            what=lambda: f"they are equal: {self.find_differences()[:5]}",
        )

    def find_differences(self) -> list[Any]:
        """The rows that either the table or the read model has."""
        rows: list[Any] = self.admin.execute(
            "with t as (select id, name, version from items where not deleted),"
            " m as (select id, name, version from item_rm)"
            " (table t except table m) union all (table m except table t)"
        ).fetchall()
        return rows
