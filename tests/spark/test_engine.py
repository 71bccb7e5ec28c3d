"""Spark is started for ranges, and let go when there are none for long enough."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from jobs_lib.postgres.database import Database
from spark_bridge import SparkEngine, engine

DATABASE = Database("postgresql://localhost/none")


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What the engine asks of Spark, of which none is started."""
    said: list[str] = []

    @contextmanager
    def open_session(master, settings):
        said.append(f"start {master}")
        yield "a session"
        said.append("stop")

    def load(session, target, loading, ranges):
        assert session == "a session"
        said.append(f"load {ranges}")

    monkeypatch.setattr(engine, "open_session", open_session)
    monkeypatch.setattr(engine, "load_with_spark", load)
    monkeypatch.setattr(engine, "find_session", lambda: None)
    monkeypatch.setattr(engine, "check_session", lambda *_: None)
    return said


def test_spark_is_stopped_after_the_time_and_started_for_the_next_ranges(said):
    with SparkEngine("local[2]", keep=60) as spark:
        spark.idle(100)
        spark.load(DATABASE, None, [1, 2])  # type: ignore[arg-type]
        spark.idle(59.9)
        spark.load(DATABASE, None, [3])  # type: ignore[arg-type]
        assert said == ["start local[2]", "load [1, 2]", "load [3]"]
        spark.idle(60)
        spark.idle(61)
        assert said[3:] == ["stop"]
        spark.load(DATABASE, None, [4])  # type: ignore[arg-type]
    assert said[4:] == ["start local[2]", "load [4]", "stop"]


def test_leaving_the_engine_stops_nothing_twice(said):
    with SparkEngine("local[2]") as spark:
        spark.load(DATABASE, None, [1])  # type: ignore[arg-type]
        spark.idle(60)
    assert said == ["start local[2]", "load [1]", "stop"]
