"""The newest record of a key is found backwards from the end of its partition."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from jobs_lib.errors import OffsetError, TopicError
from jobs_lib.kafka import newest
from jobs_lib.kafka.newest import find_newest
from jobs_lib.partitioner import choose_partition
from jobs_lib.settings import load_settings
from tests.support.records import make_producer

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

PATIENT = 60.0


@pytest.fixture
def settings(bootstrap_servers) -> Settings:
    """The settings of who searches."""
    return load_settings(kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Read a few offsets at a time."""
    monkeypatch.setattr(newest, "_FIRST", 3)
    monkeypatch.setattr(newest, "_MOST", 12)


def test_of_each_key_the_newest_record_is_found_wherever_it_is(
    topic, settings, bootstrap_servers, small_parts
):
    name, count = topic(2), 60
    rng = random.Random(5)
    keys = ["first", *(f"k{rng.randrange(20)}" for _ in range(count)), "last"]
    producer = make_producer(bootstrap_servers)
    for number, key in enumerate(keys):
        producer.produce(name, str(number), key=key)
    assert producer.flush(30) == 0
    for key in {*keys}:
        found = find_newest(settings, name, key, seconds=PATIENT)
        assert found.message is not None
        last = len(keys) - 1 - keys[::-1].index(key)
        assert found.message.value() == str(last).encode()
        assert found.partition == choose_partition(key, 2)
        assert found.looked_from <= (found.message.offset() or 0) < found.end
    nowhere = find_newest(settings, name, "nowhere", seconds=PATIENT)
    assert (nowhere.message, nowhere.looked_from) == (None, 0)


def test_a_record_of_an_aborted_or_an_open_transaction_is_none(
    topic, settings, bootstrap_servers, small_parts
):
    name = topic(1)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": f"newest-{uuid4().hex[:8]}",
        }
    )
    producer.init_transactions(60)
    for end in ("commit", "abort", "abort", "open"):
        producer.begin_transaction()
        for _ in range(5):
            producer.produce(name, end, key="k")
        assert producer.flush(30) == 0
        if end == "commit":
            producer.commit_transaction(60)
        elif end == "abort":
            producer.abort_transaction(60)
    found = find_newest(settings, name, "k", seconds=PATIENT)
    assert found.message is not None
    assert (found.message.value(), found.message.offset()) == (b"commit", 4)
    # What the open transaction has written lies behind the end.
    assert found.end == 18
    assert find_newest(settings, name, "other", seconds=PATIENT).looked_from == 0
    producer.abort_transaction(60)


def test_a_search_that_has_no_time_left_says_from_where_on_it_has_looked(
    topic, settings, bootstrap_servers
):
    name = topic(1)
    producer = make_producer(bootstrap_servers)
    for number in range(3_000):
        producer.produce(name, b"v", key=f"k{number}")
    assert producer.flush(30) == 0
    hurried = find_newest(settings, name, "k1999", seconds=0)
    assert (hurried.message, hurried.looked_from, hurried.end) == (None, 2_000, 3_000)
    assert find_newest(settings, name, "k2000", seconds=0).message is not None
    assert find_newest(settings, name, "k0", seconds=PATIENT).message is not None


def test_a_topic_or_a_partition_that_is_missing_is_refused(topic, settings):
    with pytest.raises(TopicError, match="has no topic 'no-such'"):
        find_newest(settings, "no-such", "k")
    with pytest.raises(OffsetError, match="has the partitions 0 to 0"):
        find_newest(settings, topic(1), "k", partition=1)
