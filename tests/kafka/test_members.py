"""What a process of its own asks of the coordinators of groups."""

from __future__ import annotations

from uuid import uuid4

from confluent_kafka import KafkaError

from jobs_lib.kafka import members as module
from jobs_lib.kafka.members import describe_groups
from jobs_lib.kafka.places import delete_group, read_committed
from jobs_lib.settings import load_settings
from tests.support.groups import Group


def test_a_group_is_described_and_deleted_by_one_process(bootstrap_servers, topic):
    name, settings = topic(1), load_settings(kafka_bootstrap_servers=bootstrap_servers)
    group = Group(bootstrap_servers)
    group.commit(name, 3)
    found = describe_groups(settings, [group.name], 30, rights=True)[group.name]
    assert not isinstance(found, KafkaError)
    assert (found.state, found.members) == ("EMPTY", ())
    assert {"READ", "DESCRIBE", "DELETE"} <= found.rights
    process = module._shared._process
    found = describe_groups(settings, [group.name], 30)[group.name]
    assert not isinstance(found, KafkaError)
    assert found.rights == frozenset()
    group.close()
    delete_group(settings, group.name, 30)
    assert read_committed(settings, group.name, name) == {}
    # One that is not there is left alone.
    delete_group(settings, f"none-{uuid4().hex[:8]}", 30)
    assert module._shared._process is process
