"""Keys that only the topic has become tombstones, unless they came back."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from psycopg.errors import DiskFull

from jobs_lib import operating, reexport
from jobs_lib.errors import ReexportError, TopicError, UnavailableError
from jobs_lib.kafka.places import find_settled_ends
from jobs_lib.postgres.database import Database
from jobs_lib.reexport import stale as module
from jobs_lib.reexport.stale import SqlFinder, remove_stale, version_of_end
from tests.support.apps import count, running
from tests.support.records import produce, read_topic
from tests.support.shop import COMPACTED, Shop
from tests.support.transactions import abort_when_waited_for, open_transaction
from tests.support.waiting import wait_for

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def shop(admin, database_url, bootstrap_servers, topic):
    return Shop(admin, database_url, bootstrap_servers, topic(4, config=COMPACTED))


def remove(shop, **given):
    """Begin to remove stale keys, without Spark."""
    return remove_stale(
        shop.database, shop.app.settings, shop.entity, **{"rate": 1_000_000, **given}
    )


@pytest.mark.guarantee("X10", "W26")
@pytest.mark.parametrize("orphans", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_orphans_are_gone_from_the_topic_and_the_model_and_one_that_came_back_lives(
    shop, admin, orphans
):
    last = 100 + orphans
    shop.fill(1, last)
    with running(shop.app, "executor", "relay", "consumers"):
        reexport.start(shop.database, shop.entity, rate=1_000_000)
        shop.await_end()
        shop.await_model()
    # Nobody is told.
    admin.execute("delete from items where id > 100")
    begun = remove(shop)
    assert (begun.state, begun.total, begun.stale) == ("running", orphans, True)
    # One was born between the comparison and the sending; its row says so to nobody.
    admin.execute("insert into items values (%s, 'born again', 7)", (last,))
    with running(shop.app, "executor", "relay", "consumers"):
        ended = shop.await_end()
        shop.await_model()
    assert (ended.sent, ended.state) == (orphans, "finished")
    newest = shop.read_newest()
    assert newest == shop.read_table()
    assert newest[str(last)]["name"] == "born again"
    ends = [r for r in read_topic(shop.servers, shop.topic.name) if r.value is None]
    assert {r.headers["ce_version"] for r in ends} == {"2"}
    assert len({r.key for r in ends}) == orphans - 1
    # There is nothing left to do.
    again = remove(shop)
    assert (again.state, again.total) == ("finished", 0)


def test_keys_with_odd_names_versions_and_ends(shop, bootstrap_servers):
    name = shop.topic.name
    shop.fill(1, 2)
    produce(bootstrap_servers, name, [("1", {}), ("ended", {}), ("ended", None)])
    odd = ["tab\tand\nline\\n", "ключ", "no number", "a" * 1_000]
    produce(bootstrap_servers, name, [(key, {}) for key in odd])
    # The newest record of this one has no version, and an older one has.
    produce(bootstrap_servers, name, [("mixed", {})], headers={"ce_version": "8"})
    produce(bootstrap_servers, name, [("mixed", {})])
    # Kafka itself refuses records without a key where it compacts.
    produce(bootstrap_servers, name, [("nul\0", {}), ("", {}), ("b" * 1_001, {})])
    with SqlFinder().find(shop.database, shop.app.settings, shop.entity) as stale:
        found = dict(stale.keys)
    assert stale.count == len(found)
    assert stale.unreadable == 3
    assert found == dict.fromkeys(odd) | {"mixed": 8}
    assert remove(shop).total == 5


def test_keys_of_a_column_with_a_collation_of_its_own_are_compared(shop, admin):
    admin.execute('create table names (id text collate "POSIX" primary key)')
    admin.execute("insert into names values ('kept'), ('Ä')")
    entity = shop.app.entity(shop.topic, source="names", key="id", name="names")
    entity(shop.entity.load)
    produce(shop.servers, shop.topic.name, [(k, {}) for k in ("kept", "Ä", "ä", "b")])
    names = shop.app.entities["names"]
    with SqlFinder().find(shop.database, shop.app.settings, names) as stale:
        assert sorted(stale.keys) == [("b", None), ("ä", None)]


@pytest.mark.guarantee("W28")
def test_chunks_that_would_find_no_room_are_loaded_asleep(
    shop, admin, bootstrap_servers
):
    orphans: list[tuple[str, object]] = [(f"orphan-{n}", {}) for n in range(2_000)]
    produce(bootstrap_servers, shop.topic.name, orphans)
    assert remove(shop, rate=600, chunk=50).total == 2_000
    found = admin.execute(
        "select state, count(distinct run_at) = count(run_at),"
        " sum(jsonb_array_length(payload->'keys')),"
        " max(run_at) < clock_timestamp() + interval '50 s'"
        " from jobs_lib.jobs group by state order by state"
    ).fetchall()
    # There is room for the keys of ten seconds. A quarter of 200 seconds is 50.
    assert found == [("available", True, 150, None), ("scheduled", True, 1_850, True)]


@pytest.mark.guarantee("X10")
def test_keys_that_are_deleted_meanwhile_get_no_second_tombstone(
    shop, admin, monkeypatch, bootstrap_servers
):
    name = shop.topic.name
    shop.fill(1, 4)
    records: list[tuple[str, object]] = [(str(n), {}) for n in range(1, 5)]
    produce(bootstrap_servers, name, records, headers={"ce_version": "1"})

    def find_ends(settings, topic):
        found = find_settled_ends(settings, topic)
        if admin.execute("delete from items where id < 4 returning id").fetchall():
            # Behind the application, and twice as one should: the tombstone of one is
            # in the topic, and that of the other one waits.
            produce(bootstrap_servers, name, [("2", None)], headers={"ce_version": "9"})
            with shop.database.connect("test") as connection, connection.transaction():
                shop.topic.tombstone(connection, key="3", version=9)
        return found

    monkeypatch.setattr(module, "find_settled_ends", find_ends)
    assert remove(shop).total == 1
    jobs = admin.execute("select payload->'keys' from jobs_lib.jobs").fetchall()
    assert jobs == [(["1"],)]
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    last = {r.key: r.headers["ce_version"] for r in read_topic(shop.servers, name)}
    assert last == {"1": "2", "2": "9", "3": "9", "4": "1"}


def read_versions(shop):
    """The versions of each key of the topic, in the order of its records."""
    found: dict[str, list[int]] = {}
    for one in read_topic(shop.servers, shop.topic.name):
        found.setdefault(one.key, []).append(int(one.headers["ce_version"]))
    return found


def bring_back(shop, *, gone):
    """Let the items 1 and 2 come back, and the first one go again; all is sent."""

    def await_sent():
        wait_for(
            lambda: count(shop.admin, "outbox where class = 0") == 0,
            timeout=60,
            what="live rows are sent",
        )

    with running(shop.app, "relay"):
        for item in (1, 2):
            with shop.database.connect("test") as connection, connection.transaction():
                shop.change(connection, item, 1)
        await_sent()
        if gone:
            with shop.database.connect("test") as connection, connection.transaction():
                shop.change(connection, 1, 5)
            await_sent()


@pytest.mark.guarantee("X10", "X11")
@pytest.mark.parametrize("while_it", ["compares", "sends"])
def test_no_version_goes_back_if_a_key_comes_back_and_goes_again(
    shop, admin, monkeypatch, while_it
):
    records: list[tuple[str, object]] = [(str(n), {}) for n in range(1, 4)]
    produce(shop.servers, shop.topic.name, records, headers={"ce_version": "5"})
    leave_out = module._leave_out_recent

    def leave_out_late(*given):
        kept = [*leave_out(*given)]
        bring_back(shop, gone=True)
        return kept

    if while_it == "compares":
        monkeypatch.setattr(module, "_leave_out_recent", leave_out_late)
        assert remove(shop).total == 3
    else:
        assert remove(shop).total == 3
        with running(shop.app, "executor"):
            wait_for(
                lambda: count(admin, "outbox") == 3, timeout=60, what="the rows wait"
            )
        reexport.pause(shop.database, "items")
        bring_back(shop, gone=True)
        reexport.resume(shop.database, "items")
    with running(shop.app, "executor", "relay"):
        ended = shop.await_end()
    assert (ended.sent, ended.superseded) == (1, 2)
    assert read_versions(shop) == {"1": [5, 11, 15], "2": [5, 11], "3": [5, 6]}
    assert shop.read_newest() == shop.read_table()


@pytest.mark.guarantee("X10", "X11")
def test_no_version_goes_back_behind_an_open_transaction(shop, monkeypatch):
    records: list[tuple[str, object]] = [(str(n), {}) for n in range(1, 4)]
    produce(shop.servers, shop.topic.name, records, headers={"ce_version": "5"})
    producer = open_transaction(shop.servers, shop.topic.name, 4)
    # The rows of these have left before the re-export begins.
    produce(shop.servers, shop.topic.name, records, headers={"ce_version": "7"})
    abort_when_waited_for(monkeypatch, producer)
    assert remove(shop).total == 3
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    assert read_versions(shop) == {str(n): [5, 7, 8] for n in range(1, 4)}


@pytest.mark.guarantee("X10", "X11")
def test_an_end_that_is_held_follows_the_version_of_the_topic(shop, admin):
    produce(shop.servers, shop.topic.name, [("1", {})], headers={"ce_version": "5"})
    assert remove(shop).total == 1
    # It was marked as deleted, behind the application, at a version of long ago.
    admin.execute("insert into items values (1, 'gone', 2, true)")
    load, broken = shop.entity.load, {"1"}

    def load_or_fail(connection, keys):
        if broken & {*keys}:
            raise RuntimeError("not now")
        return load(connection, keys)

    object.__setattr__(shop.entity, "load", load_or_fail)
    with running(shop.app, "executor", "relay"):
        wait_for(
            lambda: count(admin, "held_rows") == 1, timeout=60, what="the row is held"
        )
        broken.clear()
        operating.retry_holds(shop.database)
        shop.await_end()
    assert read_versions(shop) == {"1": [5, 6]}


class Broken:
    """A finder that fails, while a transaction gives a change to the re-export."""

    def __init__(self, shop):
        self.shop = shop

    @contextmanager
    def find(self, database, settings, entity):
        with database.connect("test") as connection, connection.transaction():
            self.shop.app.reexport_changes(connection, "items", rate=60)
            self.shop.topic.send_current(connection, key="7", version=1)
        raise ReexportError("no Spark")
        yield


def test_a_comparison_that_fails_loads_nothing_and_ends(shop, admin):
    shop.fill(1, 7)
    with pytest.raises(ReexportError, match="no Spark"):
        remove(shop, finder=Broken(shop))
    given = reexport.status(shop.database, "items")
    assert (given.state, given.stale, given.total) == ("loading", False, 1)
    with running(shop.app, "relay"):
        shop.await_end()
    assert shop.read_newest().keys() == {"7"}
    # Nothing was given to this one.
    empty = Broken(shop)
    empty.find = contextmanager(raise_at_once)  # type: ignore[method-assign]
    with pytest.raises(ReexportError, match="no Kafka"):
        remove(shop, finder=empty)
    assert reexport.status(shop.database, "items").state == "finished"
    assert count(admin, "jobs") == 0


def test_changes_that_join_a_comparison_for_a_window_are_not_held_back(shop):
    shop.fill(1, 7)
    # A minute, in which the rate is that of all that is left.
    window = reexport.parse_window("00:00-00:01", "UTC")
    with pytest.raises(ReexportError, match="no Spark"):
        remove(shop, rate=window, finder=Broken(shop))
    failed = reexport.status(shop.database, "items")
    assert (failed.rate, failed.left) == (60_000, 1)
    with running(shop.app, "relay"):
        shop.await_end()
    joined = remove(shop, rate=window, finder=Joined(shop, 195))
    assert (joined.rate, joined.left) == (200, 195)


class Joined:
    """A finder of no keys, while a transaction gives changes to the re-export."""

    def __init__(self, shop, changes):
        self.shop = shop
        self.changes = changes

    @contextmanager
    def find(self, database, settings, entity):
        with database.connect("test") as connection, connection.transaction():
            self.shop.app.reexport_changes(connection, "items", rate=6_000)
            for number in range(self.changes):
                self.shop.topic.send_current(connection, key=str(number), version=1)
        yield module.Stale(0, 0, [], find_settled_ends(settings, entity.topic.name))


def test_the_error_of_a_comparison_is_told_although_the_database_is_away(
    shop, monkeypatch
):
    broken = Broken(shop)

    def refuse(*_, **__):
        raise UnavailableError("the database does not answer")

    with monkeypatch.context() as patch:

        def go_away(*_):
            patch.setattr(Database, "connect", refuse)
            raise ReexportError("no Spark")
            yield

        broken.find = contextmanager(go_away)  # type: ignore[method-assign]
        with pytest.raises(ReexportError, match="no Spark"):
            remove(shop, finder=broken)
    # It goes on as if it had been killed.
    assert remove(shop).state == "finished"


def raise_at_once(*_):
    raise ReexportError("no Kafka")
    yield


def test_one_that_was_killed_while_it_compared_goes_on_and_is_not_done(shop):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])
    killed = module._begin(shop.database, shop.entity, 60)
    assert reexport.status(shop.database, "items").state == "loading"
    again = remove(shop, rate=90)
    assert (again.id, again.total, again.rate, again.state) == (
        killed.id,
        2,
        90,
        "running",
    )
    reexport.cancel(shop.database, "items")

    class Cancelled(SqlFinder):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                reexport.cancel(shop.database, "items")
                yield found

    with pytest.raises(ReexportError, match="was ended meanwhile"):
        remove(shop, finder=Cancelled())
    assert reexport.status(shop.database, "items").state == "cancelled"

    class Twice(SqlFinder):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                remove(shop, rate=60)
                yield found

    loaded = remove(shop, rate=70, finder=Twice())
    assert (loaded.total, loaded.rate, loaded.ranges) == (2, 70, 1)


@pytest.mark.guarantee("X10")
def test_a_second_call_that_fails_does_not_end_the_first_one(shop):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])

    class Twice(SqlFinder):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                with pytest.raises(ReexportError, match="no Spark"):
                    remove(shop, finder=Broken(shop))
                yield found

    loaded = remove(shop, rate=70, finder=Twice())
    # One more is the change that a transaction has given to it.
    assert (loaded.ranges, loaded.stale, loaded.total) == (1, True, 3)


@pytest.mark.guarantee("X10", "X11")
def test_one_that_its_beginner_has_given_up_is_not_loaded_by_another_call(shop, admin):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])
    begun = module._begin(shop.database, shop.entity, 60)

    class Second(Joined):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                module._give_up(shop.database, begun)
                yield found

    with pytest.raises(ReexportError, match="was ended meanwhile"):
        remove(shop, finder=Second(shop, 1))
    # Its change still leaves.
    given = reexport.status(shop.database, "items")
    assert (given.state, given.stale, given.ranges) == ("loading", False, 0)
    assert count(admin, "jobs") == 0


@pytest.mark.guarantee("X10")
@pytest.mark.parametrize("fails", [False, True])
def test_keys_are_not_loaded_into_another_one_that_got_the_id_after_a_failover(
    shop, admin, fails
):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])

    class Lost(SqlFinder):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                # The commit of this one is lost, and the next one gets its id.
                admin.execute(
                    "update jobs_lib.reexports set entity = 'others',"
                    " started_at = clock_timestamp()"
                )
                if fails:
                    raise ReexportError("no Kafka")
                yield found

    with pytest.raises(ReexportError, match="no Kafka" if fails else "has lost its"):
        remove(shop, finder=Lost())
    other = reexport.status(shop.database, "others")
    assert (other.state, other.stale, other.ranges) == ("loading", True, 0)
    assert count(admin, "jobs") == 0


@pytest.mark.guarantee("FP12")
@pytest.mark.parametrize("where", ["_compare", "encode_stale"])
def test_a_disk_that_is_full_is_named_and_nothing_is_loaded(
    shop, admin, monkeypatch, where
):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])

    def refuse(*_args):
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module, where, refuse)
        with pytest.raises(ReexportError, match="make room there, and start again"):
            remove(shop)
    assert count(admin, "jobs") == 0
    assert remove(shop).total == 2


class Meanwhile(SqlFinder):
    """A finder that does something while its keys are loaded."""

    def __init__(self, act):
        self.act = act

    @contextmanager
    def find(self, *given):
        def yield_and_act(keys):
            yield keys[0]
            self.act()
            yield from keys[1:]

        with super().find(*given) as found:
            yield replace(found, keys=yield_and_act([*found.keys]))


@pytest.mark.guarantee("X11")
def test_live_rows_do_not_wait_while_stale_keys_are_loaded(shop, admin):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])

    def look() -> None:
        # A relay locks the row for each block with rows that were given to it.
        admin.execute("select 1 from jobs_lib.reexports for update nowait")

    assert remove(shop, finder=Meanwhile(look)).total == 2


def test_keys_that_another_call_has_loaded_meanwhile_are_loaded_once(shop, admin):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])
    finder = Meanwhile(lambda: remove(shop, rate=60))
    loaded = remove(shop, rate=70, chunk=1, finder=finder)
    assert (loaded.total, loaded.rate, loaded.ranges) == (2, 70, 1)
    keys = admin.execute(
        "select k from jobs_lib.jobs, jsonb_array_elements_text(payload->'keys') k"
    ).fetchall()
    assert sorted(keys) == [("1",), ("2",)]


def test_what_another_call_has_ended_meanwhile_is_done(shop):
    class Twice(SqlFinder):
        @contextmanager
        def find(self, *given):
            with super().find(*given) as found:
                remove(shop)
                yield found

    ended = remove(shop, finder=Twice())
    assert (ended.state, ended.total, ended.ranges) == ("finished", 0, 1)


def test_one_that_is_cancelled_while_its_keys_are_loaded_loads_none(shop, admin):
    produce(shop.servers, shop.topic.name, [("1", {}), ("2", {})])
    finder = Meanwhile(lambda: reexport.cancel(shop.database, "items"))
    with pytest.raises(ReexportError, match="was ended meanwhile"):
        remove(shop, chunk=1, finder=finder)
    assert count(admin, "jobs") == count(admin, "reexport_ranges") == 0


def test_the_end_of_a_key_follows_all_its_versions():
    assert version_of_end(7, True) == 8
    assert version_of_end(7, False) == 8
    assert version_of_end(None, True) == 0
    assert version_of_end(None, False) is None
    assert version_of_end(2**63 - 1, True) == 2**63 - 1


def test_a_second_call_goes_on_at_the_new_rate(shop, admin, bootstrap_servers):
    produce(bootstrap_servers, shop.topic.name, [(str(n), {}) for n in range(250)])
    begun = remove(shop, rate=60)
    again = remove(shop, rate=90)
    assert (again.id, again.rate, again.total) == (begun.id, 90, 250)
    assert count(admin, "jobs") >= 3
    keys = admin.execute(
        "select k from jobs_lib.jobs, jsonb_array_elements_text(payload->'keys') k"
    ).fetchall()
    assert sorted(key for (key,) in keys) == sorted(map(str, range(250)))
    with pytest.raises(ReexportError, match=f"re-export {begun.id} .* removes stale"):
        reexport.start(shop.database, shop.entity, rate=60)
    reexport.cancel(shop.database, "items")
    other = reexport.start(shop.database, shop.entity, rate=60)
    assert not other.stale
    shop.fill(1, 1)
    reexport.start(shop.database, shop.entity, rate=60)
    with pytest.raises(ReexportError, match="has not ended, and there is one at a"):
        remove(shop)


def test_topics_that_cannot_be_compared_are_refused_and_nothing_is_loaded(
    shop, admin, topic
):
    app, load = shop.app, shop.entity.load
    events = app.topic(topic(1), compacted=True)
    app.entity(events, source="items", key="id", name="events")(load)
    nowhere = app.topic("no-such-topic", compacted=True)
    app.entity(nowhere, source="items", key="id", name="nowhere")(load)
    shared = app.topic(topic(1, config=COMPACTED), compacted=True)
    app.entity(shared, source="items", key="id", name="one")(load)
    app.entity(shared, source="item_rm", key="id", name="other")(load)
    for name, error, text in (
        ("events", ReexportError, r"not compacted .*cleanup\.policy=delete"),
        ("nowhere", TopicError, "no-such-topic"),
        ("one", ReexportError, r"several entities \(tables: item_rm, items\)"),
    ):
        with pytest.raises(error, match=text):
            remove_stale(shop.database, app.settings, app.entities[name], rate=60)
    with pytest.raises(ReexportError, match="the rate must be"):
        remove(shop, rate=0)
    with pytest.raises(ReexportError, match="a chunk holds"):
        remove(shop, chunk=0)
    assert count(admin, "reexports") == count(admin, "jobs") == 0
