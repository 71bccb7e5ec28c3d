"""Operators of a coordination log who may only read, and what they are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from jobs_lib.coordination.consumer import Consumer
from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import ClaimingPartition, Sender, Shared
from jobs_lib.errors import AccessError
from jobs_lib.kafka.places import find_places
from jobs_lib.operating.coordination import Viewer, create_log, pause
from jobs_lib.settings import Settings
from tests import support
from tests.security.helpers import CANARY, User
from tests.support.secured import SECURED

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "shop.mailer"
LOG = "guarded-coordination"


@pytest.fixture
def everything(secured, secured_admin) -> Iterator[Settings]:
    """Settings of a client with all rights, and a log in which it holds a partition."""
    settings = Settings(kafka_bootstrap_servers=secured.bootstrap_servers)
    support.create_topic(secured_admin, LOG, 1, WANTED)
    with Log(settings, LOG, Sender(GROUP, "a", "1"), interval=0.5) as log:
        claim = ClaimingPartition(log.sender, Shared(GROUP, LOG, 0), 500)
        log.send(claim).wait(30)
    yield settings
    support.delete_topics(secured_admin, [LOG])


def test_who_may_only_read_a_log_sees_it_and_is_told_what_that_is_worth(
    everything, secured, grant
):
    grant("alice", "TOPIC", LOG, "READ")
    alice = Settings(
        kafka_bootstrap_servers=secured.address_of(SECURED),
        kafka=User("alice").kafka(secured),
    )
    with pytest.raises(AccessError, match=f"DESCRIBE_CONFIGS.*{LOG}") as refused:
        Viewer(alice, LOG).__enter__()
    grant("alice", "TOPIC", LOG, "DESCRIBE_CONFIGS")
    before = find_places(everything, LOG, "end")
    with Viewer(alice, LOG) as viewer:
        view = viewer.look()
    # A holder that has died since seems to live, and the view says so.
    assert (view.is_now, view.parts[0].state) == (False, "fresh")
    assert view.parts[0].client == "a"
    assert find_places(everything, LOG, "end") == before
    with pytest.raises(AccessError, match=f"WRITE.*{LOG}"):
        pause(alice, LOG, GROUP, timedelta(minutes=1))
    with pytest.raises(AccessError, match="CREATE"):
        create_log(alice, "guarded-other")
    assert find_places(everything, LOG, "end") == before
    assert CANARY not in str(refused.value)
    with Viewer(everything, LOG) as viewer:
        assert viewer.look().is_now


def test_a_consumer_over_a_log_needs_no_right_on_a_group(
    everything, secured, secured_topic, grant, wait_for
):
    data = secured_topic()
    for right in ("READ", "WRITE", "DESCRIBE_CONFIGS"):
        grant("alice", "TOPIC", LOG, right)
    grant("alice", "TOPIC", data, "READ")
    producer = Producer({"bootstrap.servers": secured.bootstrap_servers})
    seen: list[int] = []
    consumer = Consumer(
        Settings(
            kafka_bootstrap_servers=secured.address_of(SECURED),
            kafka=User("alice").kafka(secured),
        ),
        log=LOG,
        group="shop.reader",
        client_id="a",
        topics=[data],
        handle=lambda records: seen.extend(one.offset for one in records),
        interval=0.5,
    )
    with consumer:
        # Kafka denies the client its question for the group now and then meanwhile.
        for number in range(30):
            producer.produce(data, b"value")
            producer.flush(30)
            wait_for(lambda count=number + 1: len(seen) == count)
    assert seen == list(range(30))
