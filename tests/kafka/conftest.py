"""Stages on a broker that a test may kill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.consuming import gated
from jobs_lib.executor.limiting import gate as job_gate
from tests.support.apps import make_app
from tests.support.groups import Group
from tests.support.outbox.stage import Stage
from tests.support.proxy import Proxy
from tests.support.topics import create_topic, delete_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import App


@pytest.fixture
def database_proxy(database_url) -> Iterator[Proxy]:
    """A proxy before the database of the test."""
    with Proxy.before(database_url) as proxy:
        yield proxy


@pytest.fixture
def make_stage(own_broker, run_process) -> Iterator[Callable[..., Stage]]:
    """A function that makes a stage on that broker, with topics of its own.

    `make_stage(url, partitions, config=None, **settings)`: see `Stage`. `config` is the
    configuration of the topics.
    """
    made: list[Stage] = []

    def make(
        url: str, partitions: int, config: dict[str, str] | None = None, **settings
    ) -> Stage:
        stage = Stage(
            url,
            own_broker.bootstrap_servers,
            own_broker.create(partitions, config),
            own_broker.create(partitions, config),
            run_process,
            partitions=partitions,
            **settings,
        )
        made.append(stage)
        return stage

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def make(database_url, bootstrap_servers) -> Callable[..., App]:
    """A function that makes an app with Kafka."""
    return lambda **settings: make_app(
        database_url, kafka_bootstrap_servers=bootstrap_servers, **settings
    )


@pytest.fixture
def read_offsets(admin) -> Callable[[str], dict[int, int]]:
    """A function that reads the stored offsets of a topic, by partition."""

    def read(topic: str) -> dict[int, int]:
        rows = admin.execute(
            "select partition, next_offset from jobs_lib.offsets"
            " where topic = %s and next_offset is not null",
            (topic,),
        )
        return dict(rows.fetchall())

    return read


@pytest.fixture
def seen(admin) -> str:
    """The statement that notes a record's partition and its number."""
    admin.execute("create table seen (at bigserial, partition int, n int)")
    return "insert into seen (partition, n) values (%s, %s)"


@pytest.fixture
def read_seen(admin) -> Callable[..., list[int]]:
    """A function that reads the numbers noted of a partition, by default of 0."""

    def read(partition: int = 0) -> list[int]:
        rows = admin.execute(
            "select n from seen where partition = %s order by at", (partition,)
        )
        return [n for (n,) in rows.fetchall()]

    return read


@pytest.fixture
def make_anew(kafka_admin) -> Callable[[str], None]:
    """A function that deletes a topic and makes it again."""

    def make_anew(name: str) -> None:
        delete_topics(kafka_admin, [name])
        create_topic(kafka_admin, name, 1)

    return make_anew


@pytest.fixture
def patient_gates(monkeypatch) -> None:
    """Let no answer of Kafka become too old: it takes long while a machine is busy."""
    for module in (gated, job_gate):
        monkeypatch.setattr(module, "REFRESHES", 600)


@pytest.fixture
def group(bootstrap_servers) -> Iterator[Callable[[], Group]]:
    """A function that makes a group that others wait for."""
    made: list[Group] = []

    def make_group() -> Group:
        made.append(Group(bootstrap_servers))
        return made[-1]

    yield make_group
    for one in made:
        one.close()
