"""Pauses are written for every pod to see, listed, and removed."""

from __future__ import annotations

import pytest

from jobs_lib.errors import OperatingError
from jobs_lib.operating import list_pauses, pause, resume
from tests.operating.helpers import add_job, add_owner


def test_a_pause_is_listed_until_it_is_resumed(database):
    assert pause(database, "type", "work").changed
    assert not pause(database, "type", "work").changed
    pause(database, "group", "work")
    assert [(p.kind, p.name) for p in list_pauses(database)] == [
        ("group", "work"),
        ("type", "work"),
    ]
    assert resume(database, "type", "work").changed
    assert not resume(database, "type", "work").changed
    assert [(p.kind, p.name) for p in list_pauses(database)] == [("group", "work")]


@pytest.mark.parametrize(
    ("kind", "name"), [("type", "work"), ("origin", "local/3"), ("group", "g")]
)
def test_a_name_that_nothing_has_is_paused_with_a_warning(
    database, connect, command, kind, name
):
    admin = connect(autocommit=True)
    add_owner(admin, types=["work"])
    add_job(admin, group="g")
    assert pause(database, kind, name).known
    assert not pause(database, kind, "misspelt").known
    result = command("jobs", "pause", kind, "other")
    assert result.exit_code == 0
    assert result.stdout == f"paused: {kind} other\n"
    assert f"no {kind} 'other' is known" in result.stderr
    assert command("jobs", "resume", kind, "other").stdout == f"resumed: {kind} other\n"
    assert name in command("jobs", "pauses").output


def test_an_invalid_pause_is_refused(database):
    with pytest.raises(OperatingError, match="cannot pause a 'pod'"):
        pause(database, "pod", "x")
    with pytest.raises(OperatingError, match="'' is no name"):
        resume(database, "group", "")
