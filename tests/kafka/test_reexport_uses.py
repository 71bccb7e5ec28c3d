"""What re-exports are for: afterwards the topic and the read model equal the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs_lib import reexport
from jobs_lib.service.resync import resync
from tests.support.apps import running
from tests.support.records import produce, read_topic
from tests.support.shop import COMPACTED, Item, Shop
from tests.support.topics import make_anew

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def shop(admin, database_url, bootstrap_servers, topic):
    """A service whose topic and read model have all items."""
    shop = Shop(admin, database_url, bootstrap_servers, topic(4, config=COMPACTED))
    shop.fill(1, 100)
    with running(shop.app):
        export(shop)
        shop.await_model()
    return shop


def export(shop):
    reexport.start(shop.database, shop.entity, rate=1_000_000)
    shop.await_end()


@pytest.mark.guarantee("W23")
@pytest.mark.expects("fenced", "loop.failed")
def test_a_topic_that_was_lost_is_filled_again(shop, admin, kafka_admin):
    with running(shop.app):
        make_anew(kafka_admin, shop.topic.name, 4)
        # While it was gone, an item was changed and nobody was told.
        admin.execute("update items set name = 'new', version = 2 where id = 5")
        export(shop)
        shop.await_model()
    assert shop.read_newest() == shop.read_table()


@pytest.mark.guarantee("W33")
def test_a_change_that_is_given_behind_a_waiting_live_one_is_sent(shop, connect):
    with connect() as connection:
        shop.change(connection, 7, 1)
    with connect() as connection:
        shop.app.reexport_changes(connection, "items", rate=600_000)
        connection.execute("update items set name = 'bulk', version = 12 where id = 7")
        shop.topic.send_current(connection, key="7")
    with running(shop.app, "relay"):
        shop.await_end()
    assert shop.read_newest()["7"] == shop.read_table()["7"]


@pytest.mark.guarantee("W23")
def test_a_topic_with_wrong_states_is_right_again(shop, bootstrap_servers):
    wrong = [(str(n), {"id": n, "name": "wrong", "version": 1}) for n in range(1, 50)]
    produce(bootstrap_servers, shop.topic.name, wrong, headers={"ce_version": "1"})
    assert shop.read_newest() != shop.read_table()
    with running(shop.app):
        export(shop)
        shop.await_model()
    assert shop.read_newest() == shop.read_table()


@pytest.mark.guarantee("W23", "W25")
def test_an_update_behind_the_application_is_sent(shop, admin):
    admin.execute("update items set name = 'renamed', version = 2 where id <= 50")
    admin.execute("update items set deleted = true, version = 2 where id > 90")
    with running(shop.app):
        export(shop)
        shop.await_model()
    assert len(shop.read_newest()) == 90
    assert shop.read_newest() == shop.read_table()
    ends = [one for one in read_topic(shop.servers, shop.topic.name) if not one.value]
    assert {one.headers["ce_version"] for one in ends} == {"2"}
    assert admin.execute("select count(*) from item_rm").fetchone() == (90,)


@pytest.mark.guarantee("W23")
def test_states_of_new_logic_are_sent_and_a_resync_writes_them_under_their_versions(
    shop, admin
):
    load = shop.entity.load

    def load_loudly(connection, keys):
        found = load(connection, keys)
        return {
            k: Item(one.id, one.name.upper(), one.version) for k, one in found.items()
        }

    shop.entity = shop.app.entities["items"] = replace(shop.entity, load=load_loudly)
    with running(shop.app):
        export(shop)
        assert {one["name"] for one in shop.read_newest().values()} == {
            f"ITEM {n}" for n in range(1, 101)
        }
        # The versions are as they were, so the model has taken these for repetitions.
        assert len(shop.find_differences()) == 0
        resync(shop.app, "item_rm")
    admin.execute("update items set name = upper(name)")
    assert shop.find_differences() == []
