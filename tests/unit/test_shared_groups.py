"""A start asks who reads a group until its own database has told its pods."""

from __future__ import annotations

from functools import partial
from unittest.mock import MagicMock, Mock
from uuid import uuid4

import pytest

from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.kafka import shared_groups
from jobs_lib.kafka.members import GroupMember
from jobs_lib.service.preparation import refuse_shared_groups
from jobs_lib.service.service import Service
from tests.support.apps import make_app


@pytest.fixture
def service():
    """A service that has not started, with a consumer."""
    app = make_app("postgresql://nobody@127.0.0.1:1/none")

    @app.consumer("orders", group="readers")
    def read(record, connection) -> None: ...

    return Service(app, ["consumers"])


@pytest.fixture
def member(monkeypatch) -> None:
    """A member of the service's group that reads for another database."""
    stranger = GroupMember("stranger", "/there", None, frozenset())
    found = {"readers": (stranger,)}
    monkeypatch.setattr(shared_groups, "_find_members", lambda *_: found)
    monkeypatch.setattr(shared_groups, "_find_marked", lambda *_: "orders")


@pytest.mark.expects("loop.failed")
def test_a_start_whose_database_is_away_for_a_moment_still_checks_its_groups(
    service, member
):
    connection = MagicMock()
    connection.__enter__().execute.return_value = [("pod-1",)]
    database = MagicMock(
        connect=Mock(side_effect=[UnavailableError("away"), connection])
    )
    shown = database, service.app, service.parts, uuid4()
    with pytest.raises(ConfigurationError, match="as stranger at there"):
        service._patiently(partial(refuse_shared_groups, *shown))


def test_a_start_goes_on_where_kafka_does_not_say_who_reads_a_group(
    service, monkeypatch
):
    silent = Mock(side_effect=UnavailableError("no broker answers"))
    monkeypatch.setattr(shared_groups, "_find_members", silent)
    refuse_shared_groups(Mock(), service.app, service.parts, uuid4())
    assert silent.called
