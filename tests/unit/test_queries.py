"""The named queries are read once, for all calls that need them."""

from __future__ import annotations

from jobs_lib.postgres.queries import load_queries


def test_the_queries_of_a_schema_are_made_once():
    assert load_queries("mine") is load_queries("mine")
    assert load_queries("mine") is not load_queries("other")
