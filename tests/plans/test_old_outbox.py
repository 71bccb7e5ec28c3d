"""A relay reads little beside an old snapshot, and still finds every row."""

from __future__ import annotations

import math
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.outbox.starts import Starts
from tests.plans.test_plans import Plans, count_pages, show_pages
from tests.support.apps import make_app
from tests.support.outbox.steps import RelaySteps, own_shards

ROWS = 32_000
OWNER = uuid4()
SHARDS = [0, 1, 2, 3]
WRITE = "insert into jobs_lib.outbox (shard, topic, key, value, class) "
_GONE = (
    WRITE + "select n %% 4, 'gone', 'k' || n, '', n %% 2 from generate_series(1, %s) n"
)
FEW = 100
"""Pages of a look that reads no row; PostgreSQL 15 reads more of the catalog."""


@pytest.fixture
def reader(database, admin):
    """The reader of a relay that owns the shards and does nothing by itself."""
    own_shards(admin, OWNER, SHARDS)
    app = make_app(database.url)
    app.topic("calm", compacted=True, settle=60)
    return RelaySteps(app, OWNER).reader


class Eyes:
    """Reads as a sender does, and counts the pages."""

    def __init__(self, connection, starts, reader) -> None:
        self._connection = connection
        self._plans = Plans(connection)
        show_pages(connection)
        self.starts = starts
        self._reader = reader
        self.pages = 0

    def look(self, *, complete: bool = False) -> list[int]:
        """Find the shards that have rows, as if a complete look were due."""
        self.starts.due_at = 0.0 if complete else math.inf
        with self._plans.told(generic=True) as told:
            pending = self.starts.find_pending(self._connection, SHARDS)
        self.pages = sum(map(count_pages, told))
        return [shard for shard, _ in pending]

    def read(self, shard: int) -> list[str | None]:
        """Read the keys of the next block of a shard."""
        with self._plans.told(generic=True) as told:
            block = self._reader.read(
                self._connection, shard, 1, self.starts.get(shard)
            )
        self.pages = sum(map(count_pages, told))
        return [record.key for record in block.records]

    def settle(self, *, seconds: float = 9.0) -> None:
        """Pretend that the last mark, if there is one, is this many seconds old."""
        if self.starts._mark is not None:
            at = self.starts._mark.at - seconds
            self.starts._mark = self.starts._mark._replace(at=at)
        self.look(complete=True)

    def know(self, admin) -> None:
        """Learn the highest id, as the sender of a block does."""
        (top,) = admin.execute(
            "select last_value from jobs_lib.outbox_id_seq"
        ).fetchone()
        self.starts.reach(top)


@pytest.fixture
def eyes(database, reader, monkeypatch):
    """The eyes of a sender that takes no look for a quick one."""
    monkeypatch.setattr("jobs_lib.outbox.starts._QUICK", -1.0)
    with database.connect("test", impatient=True) as connection:
        eyes = Eyes(connection, Starts(database.queries), reader)
        eyes.look()
        yield eyes


@pytest.fixture
def gone(admin, connect):
    """Many rows have come and left, and a session could still see them."""
    admin.execute(_GONE, (ROWS,))
    holder = connect()
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from jobs_lib.outbox")
    admin.execute("delete from jobs_lib.outbox")
    admin.execute("vacuum analyze jobs_lib.outbox")


@pytest.fixture
def write(connect):
    """A function that writes a row in a transaction that stays open."""

    def write(key: str | None, shard: int = 0) -> psycopg.Connection:
        connection = connect()
        if key is not None:
            connection.execute(
                "select jobs_lib.lock_in_order("
                "hashtextextended('shard/' || %s, 7604), hashtextextended(%s, 7603))",
                (shard, key),
            )
        connection.execute(WRITE + "values (%s, 'events', %s, '', 0)", (shard, key))
        return connection

    return write


@pytest.mark.guarantee("FP25")
def test_a_relay_does_not_walk_over_all_that_came_and_left(admin, eyes, gone):
    assert eyes.look() == []
    assert eyes.pages > ROWS / 300
    eyes.know(admin)
    eyes.settle()
    eyes.settle()
    assert eyes.look() == []
    assert eyes.pages < FEW
    admin.execute(WRITE + "values (2, 'calm', 'k', '', 0), (3, 'e', 'k', '', 0)")
    assert eyes.look() == [2, 3]
    assert eyes.pages < FEW
    # The read meets a young row of a settling topic, and looks on for re-exports.
    assert eyes.read(2) == []
    assert eyes.pages < 100
    assert eyes.read(3) == ["k"]
    assert eyes.pages < 100


@pytest.mark.guarantee("W12", "FP25")
def test_no_row_of_a_key_is_passed_over(admin, eyes, gone, write):
    late = write("k")
    admin.execute(WRITE + "values (0, 'events', 'other', '', 0)")
    eyes.know(admin)
    admin.execute("delete from jobs_lib.outbox")
    for _ in range(3):
        eyes.settle()
    late.commit()
    write("k").commit()
    # A short look finds it, too: otherwise the later row alone would leave first.
    assert eyes.look() == [0]
    assert eyes.read(0) == ["k", "k"]


def test_a_writer_of_the_release_before_is_waited_for_too(admin, eyes, gone, connect):
    late = connect()
    # It holds only the lock of its key.
    late.execute("select pg_advisory_xact_lock(hashtextextended('k', 7603))")
    late.execute(WRITE + "values (1, 'events', 'k', '', 0)")
    eyes.know(admin)
    for _ in range(3):
        eyes.settle()
    late.commit()
    assert eyes.look() == [1]


def test_a_lock_that_no_transaction_holds_is_not_waited_for(admin, eyes, gone, connect):
    leader = connect(autocommit=True)
    leader.execute("select pg_advisory_lock(1)")
    eyes.know(admin)
    eyes.settle()
    eyes.settle()
    assert eyes.look() == []
    assert eyes.pages < FEW


@pytest.mark.guarantee("W12", "FP25")
def test_a_complete_poll_finds_a_late_row_without_a_key(admin, eyes, gone, write):
    late = write(None)
    eyes.know(admin)
    eyes.settle()
    eyes.settle(seconds=1.0)
    # Within two seconds even such a row is found at once.
    late.commit()
    assert eyes.look() == [0]
    admin.execute("delete from jobs_lib.outbox")
    late = write(None)
    eyes.know(admin)
    eyes.settle()
    eyes.settle()
    late.commit()
    assert eyes.look() == []
    assert eyes.look(complete=True) == [0]
    assert eyes.read(0) == [None]


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_the_relay_finds_a_row_released_from_a_hold(admin, eyes, gone, many):
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('events', 'k', 'too large', now())"
    )
    # If there are many, the oldest thousand are read, and all lie in another shard.
    for shard, count in ((3, 1_000), (1, 1)) if many else ((1, 1),):
        admin.execute(
            "insert into jobs_lib.held_rows"
            " (shard, class, id, topic, key, value, cause, created_at)"
            " select %s, 0, nextval('jobs_lib.outbox_id_seq'), 'events', 'k', '',"
            " 'live', now() from generate_series(1, %s)",
            (shard, count),
        )
    admin.execute(WRITE + "values (1, 'events', 'other', '', 0)")
    eyes.know(admin)
    admin.execute("delete from jobs_lib.outbox")
    for _ in range(3):
        eyes.settle()
    admin.execute("select jobs_lib.lift_hold('events', 'k', null)")
    admin.execute(WRITE + "values (1, 'events', 'k', '', 0)")
    assert 1 in eyes.look()
    assert eyes.read(1) == ["k", "k"]


def test_marks_of_one_server_are_not_used_for_another(admin, eyes, gone):
    eyes.know(admin)
    eyes.settle()
    eyes.settle()
    starts = eyes.starts
    assert starts.get(0).live > ROWS
    # Ids repeat, and no server was started one microsecond after the epoch.
    admin.execute("alter sequence jobs_lib.outbox_id_seq restart with 7")
    admin.execute(WRITE + "values (0, 'events', 'k', '', 0)")
    before = starts._starts[0]
    assert eyes.read(0) == []
    starts._starts[0] = before._replace(server=1)
    assert eyes.read(0) == ["k"]
    starts._starts[0], starts._server = before, 1
    assert eyes.look() == [0]
    assert starts.get(0) == (0, 0, before.server)
    assert eyes.read(0) == ["k"]


def test_all_polls_are_complete_while_polls_are_quick(admin, eyes, monkeypatch):
    admin.execute(WRITE + "values (0, 'events', 'k', '', 0)")
    eyes.look()
    assert eyes.starts.due_at < math.inf
    monkeypatch.setattr("jobs_lib.outbox.starts._QUICK", 60.0)
    eyes.know(admin)
    eyes.settle()
    eyes.settle()
    assert eyes.starts.due_at == math.inf
    assert eyes.starts.get(0)[:2] == (0, 0)
