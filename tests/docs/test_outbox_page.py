"""The page on the outbox does what it says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.pages import read_blocks

PAGE = "docs/outbox.md"


@pytest.mark.guarantee("W17")
def test_the_code_of_the_page_runs_from_top_to_bottom(
    database_url, connect, monkeypatch
):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    admin = connect(autocommit=True)
    admin.execute(
        "create table aircraft (tail text primary key, seats int, version int)"
    )
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    names: dict[str, Any] = vars(page)
    for code in read_blocks(PAGE, "python"):
        exec(compile(code, PAGE, "exec"), names)
    for code in read_blocks(PAGE, "sql"):
        admin.execute(code)
    names["upgrade"](SimpleNamespace(execute=admin.execute))
    admin.execute("delete from aircraft")
    rows = admin.execute(
        "select topic, key, value is null, entity, headers from jobs_lib.outbox"
        " order by id"
    ).fetchall()
    state, landed = "aircraft-state", {"ce_type": "landed"}
    assert rows == [
        (state, "N123", False, None, None),
        ("landings", "N123", False, None, landed),
        (state, "N999", True, None, None),
        (state, "N123", True, "aircraft", None),
        (state, "N124", False, None, None),
        (state, "N124", True, None, None),
        (state, "N123", True, "aircraft", None),
        (state, "N123", True, "aircraft", None),
    ]
