"""A re-export that pauses while a group that reads its topic is too far behind."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

from jobs_lib import reexport as api
from jobs_lib.cli.reexport import reexport as commands
from jobs_lib.errors import ReexportError, UnavailableError
from jobs_lib.kafka import lag as readers
from jobs_lib.kafka.lag import find_readers
from jobs_lib.kafka.places import find_places
from jobs_lib.reexport import LagLimit, lag
from jobs_lib.settings import Settings
from jobs_lib.web import reexports
from tests.support.apps import heard, make_app, running
from tests.support.commands import make_runner
from tests.support.records import produce, read_topic
from tests.support.shop import COMPACTED, declare_items

ITEMS, LIMIT = 1_000, 60
SLOW, FAST = 1_500, 1_000_000
"""Records a minute: a slow machine pauses it long before the end; and to end it."""


pytestmark = pytest.mark.expects("fenced")


@dataclass
class Item:
    """The state of an item."""

    id: int
    version: int


@pytest.fixture
def shop(database_url, bootstrap_servers, topic, admin, monkeypatch):
    """An app with an entity, its filled table, and quick looks at the lag."""
    monkeypatch.setattr(lag, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(lag, "IDLE_SECONDS", 0.1)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    items = app.topic(topic(1), value=Item, compacted=True, partitions=1)
    admin.execute("create table items (id int primary key, version bigint not null)")
    admin.execute(
        "insert into items select g, 1 from generate_series(1, %s) g", (ITEMS,)
    )

    declare_items(app, items, Item)
    return app


@pytest.fixture
def wait_for(wait_for):
    """The function that waits; each look makes a connection, or a client of Kafka."""
    return partial(wait_for, every=0.1)


@pytest.fixture
def follower(shop, group):
    """A group that has committed the first offset of the topic."""
    found = group()
    found.commit_soon(name_topic(shop), {0: 0})
    return found


@pytest.fixture
def run(shop, monkeypatch):
    """Runs a command, and returns what it prints."""
    return make_runner(commands, shop, monkeypatch)


@pytest.fixture
def looks(monkeypatch):
    """Grows by one with each look at the lag."""
    found: list[int] = []
    look = lag.LagWatch._find_watched

    def note(self, connection) -> Any:
        rows = look(self, connection)
        found.append(len(rows))
        return rows

    monkeypatch.setattr(lag.LagWatch, "_find_watched", note)
    return found


@pytest.mark.guarantee("W31")
def test_the_lag_is_asked_for_once_the_process_may_have_more_threads(
    shop, database, follower, wait_for, monkeypatch
):
    start_thread = threading.Thread.start

    def refuse(thread) -> None:
        if thread.name == "jobs_lib positions":
            monkeypatch.setattr(threading.Thread, "start", start_thread)
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    started = start(shop, follower)
    watch = lag.LagWatch(database, shop.settings)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with heard("loop.failed") as failed:
        watch.start()
        try:
            wait_for(
                lambda: api.status(database, "items").lag is not None,
                timeout=30,
                what=f"the lag of {started.lag_group} is known",
            )
        finally:
            watch.stop()
    assert len(failed) == 1


def name_topic(app) -> str:
    return next(iter(app.topics.values())).name


def start(app, follower, rate=SLOW):
    return api.start(
        app.database(),
        app.entities["items"],
        rate=rate,
        watch_lag=LagLimit(follower.name, LIMIT),
    )


def send(connect, app, number: int) -> None:
    """Send the state of a new item."""
    with connect() as connection:
        items = next(iter(app.topics.values()))
        items.send(connection, key=str(number), value=Item(number, 1), version=1)


@pytest.mark.guarantee("W31", "X9")
def test_it_pauses_above_the_limit_and_goes_on_at_half_of_it(
    shop, follower, database, connect, bootstrap_servers, wait_for
):
    name = name_topic(shop)

    def read() -> api.Progress:
        return api.status(database, "items")

    def find_end() -> int:
        """The end of the topic: each transaction takes an offset, too."""
        return find_places(shop.settings, name, "end")[0]

    def read_keys() -> set[str]:
        return {one.key for one in read_topic(bootstrap_servers, name)}

    def wait_for_live(number: int) -> int:
        """Send a live record, which waits for nothing; return the topic's end."""
        send(connect, shop, number)
        wait_for(lambda: str(number) in read_keys(), what="the live one is there")
        return find_end()

    with heard("reexport.paused", "reexport.resumed") as told:
        start(shop, follower)
        with running(shop, "executor", "relay"):
            wait_for(lambda: read().lagging, timeout=60, what=read)
            assert read().state == "paused"
            # What was under way when it paused is there before the first one.
            wait_for_live(10_001)
            keys = read_keys()
            assert LIMIT / 2 < len(keys) < ITEMS
            end = wait_for_live(10_002)
            assert read_keys() - keys == {"10002"}
            follower.commit_soon(name, {0: end - LIMIT // 2 - 1})
            wait_for(
                lambda: read().lag == LIMIT // 2 + 1, what="more than half is left"
            )
            assert read().lagging
            follower.commit_soon(name, {0: end - LIMIT // 2})
            wait_for(lambda: find_end() > end, what="it goes on")
            wait_for(lambda: read().lagging, timeout=60, what="it pauses again")
            api.set_rate(database, "items", FAST)

            def follow() -> bool:
                follower.commit_soon(name, {0: find_end()})
                return read().state == "finished"

            wait_for(follow, timeout=60, what=read)
    events = [event for event, _ in told]
    assert events[:3] == ["reexport.paused", "reexport.resumed", "reexport.paused"]
    fields = told[0][1]
    assert (fields["entity"], fields["group"]) == ("items", follower.name)
    assert (fields["limit"], fields["lag"] > LIMIT) == (LIMIT, True)
    assert len(read_keys()) == ITEMS + 2


def test_what_a_person_has_paused_stays_so(shop, follower, database, looks, wait_for):
    name = name_topic(shop)

    def keep_up() -> None:
        ends = find_places(shop.settings, name, "end")
        follower.commit_soon(name, ends)

    def has_finished() -> bool:
        keep_up()
        return api.status(database, "items").state == "finished"

    with running(shop, "executor", "relay"):
        start(shop, follower)
        wait_for(
            lambda: api.status(database, "items").lagging, timeout=60, what="it pauses"
        )
        progress = api.pause(database, "items")
        assert (progress.state, progress.lagging) == ("paused", False)
        # Its lag is over.
        keep_up()
        after = len(looks)
        wait_for(lambda: looks[after:].count(0) > 3, what="it is looked at no more")
        assert api.status(database, "items").state == "paused"
        api.set_rate(database, "items", FAST)
        api.resume(database, "items")
        wait_for(has_finished, timeout=60, what="it goes on")


def test_without_a_limit_it_goes_on(shop, follower, database, wait_for):
    with running(shop, "executor", "relay"):
        start(shop, follower)
        wait_for(
            lambda: api.status(database, "items").lagging, timeout=60, what="it pauses"
        )
        # A person lets it go on, and the next look pauses it again.
        sent = api.resume(database, "items").sent
        wait_for(
            lambda: api.status(database, "items").lagging, timeout=60, what="once more"
        )
        # A higher limit for the same group.
        higher = LagLimit(follower.name, 10 * ITEMS)
        assert api.watch_lag(database, "items", higher).lag is not None
        wait_for(
            lambda: not api.status(database, "items").lagging, what="it is far enough"
        )
        api.watch_lag(database, "items", LagLimit(follower.name, 1))
        wait_for(lambda: api.status(database, "items").lagging, what="a low limit")
        progress = api.watch_lag(database, "items", None)
        assert (progress.state, progress.lagging) == ("running", False)
        assert (progress.lag_group, progress.lag_limit) == (None, None)
        api.set_rate(database, "items", FAST)
        wait_for(
            lambda: api.status(database, "items").state == "finished",
            timeout=60,
            what="all is sent",
        )
    assert api.status(database, "items").sent >= sent


@pytest.mark.guarantee("W29", "W31")
def test_the_plan_names_the_groups_and_what_cannot_be_watched_is_refused(
    shop, follower, database, run
):
    name = name_topic(shop)
    plan = json.loads(run("plan", "items", "--rate", "600", "--json"))
    assert {"group": follower.name, "lag": 0} in plan["groups"]
    assert f"read by {follower.name}, which is 0 records behind" in run(
        "plan", "items", "--window", "22:00-06:00"
    )
    begin = ("start", "items", "--engine", "sql", "--rate", "6000", "--watch-lag")
    with pytest.raises(ReexportError, match=f"'nobody' has committed no .* {name!r}"):
        run(*begin, "nobody:10")
    for text in ("group", ":10", "group:", "group:0", "group:-1", f"group:{10**16}"):
        with pytest.raises(ReexportError, match="lag"):
            run(*begin, text)
    with pytest.raises(ReexportError, match="was never re-exported"):
        api.status(database, "items")
    output = run(*begin, f"{follower.name}:{LIMIT}")
    assert f"the lag of {follower.name} is not known yet; above 60" in output
    assert "the lag" not in run("watch-lag", "items", "off")
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["entity"], listed["lag_group"]) == ("items", None)
    assert "items" in run("list")


@pytest.mark.guarantee("W31")
def test_the_group_that_is_furthest_behind_is_told_first(
    bootstrap_servers, topic, group
):
    name, groups = topic(1), [group() for _ in range(3)]
    produce(bootstrap_servers, name, [("a", 1)] * 3)
    for reader, offset in zip(groups, (2, 1, 3), strict=True):
        reader.commit_soon(name, {0: offset})
    settings = Settings(kafka_bootstrap_servers=bootstrap_servers)
    found = find_readers(settings, name, every=True).groups
    near, far, at_the_end = (one.name for one in groups)
    assert found == [(far, 2), (near, 1), (at_the_end, 0)]


@pytest.mark.guarantee("W31")
def test_a_plan_leaves_out_groups_of_which_kafka_says_nothing(
    bootstrap_servers, topic, monkeypatch
):
    settings = Settings(kafka_bootstrap_servers=bootstrap_servers)
    asked: list[str] = []
    silent = {"b", "d", "e", "f"}

    def read(_, group, __):
        asked.append(group)
        if group in silent:
            raise UnavailableError(f"no coordinator of {group}")
        return {0: 0}

    monkeypatch.setattr(readers, "_list_groups", lambda *_: [*"abcdefgh"])
    monkeypatch.setattr(readers, "read_committed", read)
    name = topic(1)
    found = find_readers(settings, name)
    assert [one.group for one in found.groups] == ["a", "c"]
    # Each of them costs seconds.
    assert asked == [*"abcde"]
    assert found.left_out == 6
    # Who deletes records must know of all.
    with pytest.raises(UnavailableError, match="no coordinator of b"):
        find_readers(settings, name, every=True)


@pytest.mark.guarantee("W31")
def test_the_group_must_read_the_topic_that_the_re_export_goes_to(
    shop, follower, group, topic, run
):
    goal = shop.topic(topic(1, config=COMPACTED), value=Item, compacted=True)
    reader = group()
    reader.commit_soon(goal.name, {0: 0})
    former, new = f"{follower.name}:10", f"{reader.name}:10"
    refused = f"{follower.name!r} has committed no .* {goal.name!r}"
    options = ("--topic", goal.declared, "--engine", "sql", "--rate", "60")
    begin = ("start", "items", *options, "--watch-lag")
    with pytest.raises(ReexportError, match=refused):
        run(*begin, former)
    assert f"the lag of {reader.name} is not known yet" in run(*begin, new)
    with pytest.raises(ReexportError, match=refused):
        run("watch-lag", "items", former)
    assert f"the lag of {reader.name}" in run("watch-lag", "items", new)
    web = reexports(shop, authorise=lambda _: True, hosts=["testserver"])
    with TestClient(web) as client:
        lag_of = partial(client.post, "/items/watch-lag")
        assert goal.name in lag_of(json={"limit": former}).json()["error"]
        assert lag_of(json={"limit": new}).json()["lag_group"] == reader.name
    plan = ("--rate", "60", "--topic", goal.declared, "--dry-run")
    told = run("start", "items", *plan)
    assert f"to {goal.name} in" in told
    assert f"read by {reader.name}" in told
    assert follower.name not in told
