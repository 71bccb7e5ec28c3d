"""The page on enqueueing does what it says."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.settings import default_settings

PAGE = Path(__file__).parents[2] / "docs" / "enqueue.md"


def blocks(language: str) -> list[str]:
    """The code blocks of the page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_code_of_the_page_runs_from_top_to_bottom(
    database_url, connect, monkeypatch
):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    admin = connect(autocommit=True)
    admin.execute("create table orders (id int, customer text)")
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks("python"):
        exec(compile(code, str(PAGE), "exec"), names)
    # The hook is declared last, so jobs from here on have its header.
    with connect() as connection:
        names["send_invoice"].enqueue(connection, customer="ada", order=1_000)
    monkeypatch.setenv("JOBS_LIB_APP", "page:app")
    page = types.ModuleType("page")
    vars(page).update(names)
    monkeypatch.setitem(sys.modules, "page", page)
    default_settings.cache_clear()
    (commands,) = blocks("sh")
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] != "export":
            result = CliRunner().invoke(cli, words[1:])
            assert result.exit_code == 0, (line, result.output)
    default_settings.cache_clear()
    for code in blocks("sql"):
        admin.execute(code)
    rows = admin.execute(
        "select (payload ->> 'order')::int, headers, priority from jobs_lib.jobs"
        " order by id"
    ).fetchall()
    assert rows == [
        *((n, None, 0) for n in range(7, 1_000)),
        (7, None, -1),
        (7, None, 0),
        (7, {"tenant": "acme"}, 0),
        (1_000, {"tenant": "acme"}, 0),
        (7, {"tenant": "acme"}, 0),
        (7, {"tenant": "acme"}, 0),
        (7, None, 0),
    ]
