"""The page on reading one's own writes does what it says."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime, timedelta

import pytest

from jobs_lib import EntityState
from jobs_lib.consuming import answer_checks, answer_steps
from tests.support.pages import ROOT, write_modules

PAGE = "docs/read-your-writes.md"
MODULES = ["board", "fresh", "wait", "moves"]


class Fleet:
    """The owner's API."""

    def move(self, tail: str, airport: str) -> dict[str, object]:
        return {"tail": tail, "version": 17, "airport": airport}


@pytest.fixture
def page(tmp_path, database_url, monkeypatch, admin):
    """The modules of the page, by name."""
    assert write_modules(PAGE, tmp_path) == [f"{name}.py" for name in MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.syspath_prepend(tmp_path)
    admin.execute(
        "create table aircraft_rm (tail text primary key, version bigint, airport text)"
    )
    admin.execute("insert into aircraft_rm values ('N123', 16, 'JFK')")
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.modules["board"].app.close()
    for name in MODULES:
        del sys.modules[name]


@pytest.mark.guarantee("W73", "W74")
def test_an_update_is_seen_at_once_and_waited_for(page, connect, admin):
    moves, wait, fresh = page["moves"], page["wait"], page["fresh"]
    with connect() as connection:
        assert len(moves.find_aircraft(connection, "JFK")) == 1
        assert moves.move(Fleet(), "N123", "LAX")["version"] == 17
        assert moves.find_aircraft(connection, "JFK") == []
        (found,) = moves.find_aircraft(connection, "LAX")
        assert found == {"tail": "N123", "version": 17, "airport": "LAX"}
        given = [EntityState(key="N124", version=1, entity={"airport": "LAX"})]
        rows = moves.find_aircraft(connection, "LAX", given)
        assert [row["tail"] for row in rows] == ["N123", "N124"]
        now = datetime.now(UTC)
        assert not fresh.is_fresh(connection, now)
        admin.execute(
            "insert into jobs_lib.offsets (consumer_group, topic, partition,"
            " next_offset, appended_at) values ('board', 'aircraft-state', 0, 1, %s)",
            (now,),
        )
        second = timedelta(seconds=1)
        assert fresh.is_fresh(connection, now - second)
        assert not fresh.is_fresh(connection, now + second)
    admin.execute("update aircraft_rm set version = 17, airport = 'LAX'")
    assert wait.has_seen("N123", 17)


def test_the_page_names_the_limits_that_the_code_has():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert f"{answer_steps._MOST_ENTRIES:,} entities and" in text
    assert f"and {answer_steps._MOST_BYTES >> 20} MiB" in text
    assert f"at most {answer_checks.MOST_BYTES >> 10} KiB" in text
    assert f"after {answer_steps._FIRST_PAUSE * 1000:.0f} ms" in text
