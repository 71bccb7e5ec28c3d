"""A topic is emptied and filled again by one command, wherever that is interrupted."""

from __future__ import annotations

from functools import partial

import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError, TopicError
from jobs_lib.kafka import lag
from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.topic_settings import change, delete_before, read_own
from jobs_lib.reexport import rebuild as module
from jobs_lib.reexport.rebuild import rebuild
from tests.support.apps import count, running
from tests.support.records import produce, read_topic
from tests.support.shop import Shop
from tests.support.topics import make_anew

pytestmark = pytest.mark.expects("fenced")

OWN = {"cleanup.policy": "compact", "retention.ms": "86400000"}
STEPS = ["change", "delete_before", "note_emptied", "begin", "note_begun", "load"]
KILLS = [(step, after) for step in STEPS for after in (False, True)]
EVERYDAY = [("change", True), ("delete_before", True), ("begin", True), ("load", False)]
"""One for each kind of state that a rebuild is found in: noted, perhaps emptied,
begun and not noted as begun, and to be loaded. What comes before or after the same note
looks the same to the next call."""


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def shop(admin, database_url, bootstrap_servers, topic):
    """A service whose topic has keys that the table has not."""
    shop = Shop(admin, database_url, bootstrap_servers, topic(4, config=OWN))
    shop.fill(1, 100)
    records = [(str(n), {"id": n, "name": "old", "version": 1}) for n in range(50, 150)]
    produce(bootstrap_servers, shop.topic.name, records, headers={"ce_version": "1"})
    return shop


def run(shop, **given):
    return rebuild(
        shop.database, shop.app.settings, shop.entity, **{"rate": 1_000_000, **given}
    )


def read_settings(shop):
    return read_own(
        shop.app.settings,
        shop.topic.name,
        ["cleanup.policy", "retention.ms", "retention.bytes"],
    )


def kill_at(monkeypatch, step, *, after):
    """Let the process die before or after its first try of a step."""
    died: list[str] = []

    def dies(function, *args, **values):
        if died:
            return function(*args, **values)
        died.append(step)
        if after:
            function(*args, **values)
        raise Killed

    if step.startswith("note_"):
        query = module._run

        def run_query(connection, database, entity, name, **values):
            run = query if name != step else partial(dies, query)
            return run(connection, database, entity, name, **values)

        monkeypatch.setattr(module, "_run", run_query)
    else:
        function = getattr(module, step)
        monkeypatch.setattr(module, step, lambda *a, **v: dies(function, *a, **v))


def check_equal(shop):
    """Check that the topic has what the table has, and its former settings."""
    assert shop.read_newest() == shop.read_table()
    assert read_settings(shop) == {**OWN, "retention.bytes": None}


@pytest.mark.guarantee("W27")
def test_a_rebuilt_topic_has_what_the_table_has_and_its_former_settings(shop):
    ends = len(read_topic(shop.servers, shop.topic.name))
    assert ends == 100
    with running(shop.app, "executor", "relay"):
        run(shop)
        # Live traffic goes on.
        shop.admin.execute("update items set name = 'new', version = 2 where id = 7")
        with shop.database.connect("test") as connection, connection.transaction():
            shop.topic.send_current(connection, key="7")
        ended = shop.await_end()
    assert (ended.state, ended.total) == ("finished", 100)
    check_equal(shop)
    records = read_topic(shop.servers, shop.topic.name)
    assert not [one for one in records if one.json["name"] == "old"]


@pytest.mark.guarantee("W27")
@pytest.mark.parametrize(
    ("step", "after"),
    [
        pytest.param(*one, marks=() if one in EVERYDAY else pytest.mark.slow)
        for one in KILLS
    ],
)
def test_a_rebuild_goes_on_wherever_it_was_killed(shop, monkeypatch, step, after):
    with monkeypatch.context() as patch:
        kill_at(patch, step, after=after)
        with pytest.raises(Killed):
            run(shop)
        run(shop)
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    check_equal(shop)
    # It is not done once more than needed.
    assert count(shop.admin, "reexports") == 1


@pytest.mark.guarantee("W27")
def test_a_topic_may_be_rebuilt_again(shop):
    for _ in range(2):
        produce(shop.servers, shop.topic.name, [("999", {"left": "over"})])
        run(shop)
        with running(shop.app, "executor", "relay"):
            shop.await_end()
        check_equal(shop)


def test_a_rebuild_whose_note_was_lost_gives_the_declared_policy_back(shop):
    # The server has lost its last commits, and Kafka has not.
    change(shop.app.settings, shop.topic.name, module._DELETING)
    run(shop)
    declared = shop.topic.config
    assert read_settings(shop)["cleanup.policy"] == declared["cleanup.policy"]
    assert read_settings(shop)["retention.ms"] == declared.get("retention.ms")


def test_a_topic_that_was_made_anew_meanwhile_is_filled(shop, kafka_admin, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, "delete_before", after=False)
        with pytest.raises(Killed):
            run(shop)
    make_anew(kafka_admin, shop.topic.name, 4)
    change(shop.app.settings, shop.topic.name, OWN)
    run(shop)
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    check_equal(shop)


@pytest.mark.guarantee("W27")
def test_a_group_that_is_behind_is_named_and_nothing_is_deleted(shop):
    with running(shop.app, "consumers"):
        shop.await_records(100)
    produce(shop.servers, shop.topic.name, [("1", None)], headers={"ce_version": "0"})
    with pytest.raises(ReexportError, match=rf"{shop.topic.name}-g by 1 records"):
        run(shop)
    assert len(read_topic(shop.servers, shop.topic.name)) == 101
    assert read_settings(shop) == {**OWN, "retention.bytes": None}
    assert count(shop.admin, "rebuilds") == count(shop.admin, "reexports") == 0
    run(shop, although_behind=True)
    settings, name = shop.app.settings, shop.topic.name
    assert find_places(settings, name, "start") == find_places(settings, name, "end")


@pytest.mark.guarantee("W27")
def test_a_group_that_is_behind_is_found_among_any_number_of_groups(shop, monkeypatch):
    # A plan asks no more than these.
    monkeypatch.setattr(lag, "_GROUPS", 0)
    assert lag.find_readers(shop.app.settings, shop.topic.name).groups == []
    with running(shop.app, "consumers"):
        shop.await_records(100)
    produce(shop.servers, shop.topic.name, [("1", None)], headers={"ce_version": "0"})
    with pytest.raises(ReexportError, match=rf"{shop.topic.name}-g by 1 records"):
        run(shop)


def test_what_cannot_be_rebuilt_is_refused_and_nothing_is_deleted(shop, topic):
    app = shop.app
    begun = reexport.start(shop.database, shop.entity, rate=60)
    with pytest.raises(ReexportError, match=f"re-export {begun.id} .* has not ended"):
        run(shop)
    reexport.cancel(shop.database, "items")
    for name, error, text in (
        (topic(1), ReexportError, r"not compacted"),
        ("no-such-topic", TopicError, "no-such-topic"),
    ):
        other = app.topic(name, compacted=True)
        app.entity(other, source="items", key="id", name=name)(shop.entity.load)
        with pytest.raises(error, match=text):
            rebuild(shop.database, app.settings, app.entities[name], rate=60)
    # The states of the other entity would be deleted, and not sent again.
    app.entity(shop.topic, source="item_rm", key="id", name="other")(shop.entity.load)
    with pytest.raises(ReexportError, match=r"several entities .*item_rm, items"):
        run(shop)
    del app.entities["other"]
    with pytest.raises(ReexportError, match="the rate must be"):
        run(shop, rate=0)
    with pytest.raises(ReexportError, match="the lag's limit must be"):
        run(shop, rate=60, watch_lag=reexport.LagLimit("search", 0))
    assert len(read_topic(shop.servers, shop.topic.name)) == 100
    assert count(shop.admin, "rebuilds") == 0


def test_a_re_export_that_began_before_the_topic_was_empty_does_not_count(
    shop, monkeypatch
):
    emptied = delete_before

    def start_another(*args):
        reexport.start(shop.database, shop.entity, rate=60)
        emptied(*args)

    monkeypatch.setattr(module, "delete_before", start_another)
    with pytest.raises(ReexportError, match="began before the topic was empty"):
        run(shop)
    reexport.cancel(shop.database, "items")
    run(shop)
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    check_equal(shop)


@pytest.mark.guarantee("W27")
def test_changes_that_were_given_meanwhile_do_not_count_as_what_fills_the_topic(
    shop, monkeypatch
):
    with monkeypatch.context() as patch:
        kill_at(patch, "note_emptied", after=True)
        with pytest.raises(Killed):
            run(shop)
    with shop.database.connect("test") as connection, connection.transaction():
        given = shop.app.reexport_changes(connection, "items", rate=60_000)
        shop.topic.send_current(connection, key="7")
    with running(shop.app, "relay"):
        ended = shop.await_end()
    assert (ended.id, ended.state, ended.sent) == (given, "finished", 1)
    assert run(shop).id > given
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    check_equal(shop)


def rebuild_once(shop):
    """Rebuild the topic, and fill it."""
    run(shop)
    with running(shop.app, "executor", "relay"):
        shop.await_end()


@pytest.mark.guarantee("W27")
def test_a_call_that_ends_a_former_rebuild_leaves_the_next_one_alone(shop, monkeypatch):
    rebuild_once(shop)
    former = module._find(shop.database, shop.entity)
    assert former is not None
    emptied = delete_before

    def meet_another(settings, *args):
        # It had looked before this call began, and then waited for a server.
        module._keep_if_same(shop.database, settings, shop.entity, former)
        emptied(settings, *args)

    monkeypatch.setattr(module, "delete_before", meet_another)
    assert run(shop).state == "running"
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    check_equal(shop)


@pytest.mark.guarantee("W27")
def test_a_topic_whose_note_was_lost_as_it_was_emptied_is_not_left_empty(
    shop, monkeypatch
):
    rebuild_once(shop)
    emptied = delete_before

    def lose(*args):
        shop.admin.execute("delete from jobs_lib.rebuilds")
        emptied(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "delete_before", lose)
        with pytest.raises(ReexportError, match=r"was emptied.* run this again"):
            run(shop)
    rebuild_once(shop)
    check_equal(shop)


def test_a_slow_call_fills_no_topic_that_a_faster_one_has_filled(shop, monkeypatch):
    emptied = delete_before

    def be_slow(*args):
        emptied(*args)
        monkeypatch.setattr(module, "delete_before", emptied)
        rebuild_once(shop)

    monkeypatch.setattr(module, "delete_before", be_slow)
    assert run(shop).state == "finished"
    check_equal(shop)
    assert count(shop.admin, "reexports") == 1
