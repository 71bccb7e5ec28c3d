"""The page on schemas does what it says."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys

import psycopg
import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.schemas.codec import make_decoder
from tests.support.pages import ROOT, read_blocks, write_modules
from tests.support.registry import serving

PAGE = "docs/schemas.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The page's files, in the working folder; a function that imports one of them."""
    (schema,) = read_blocks(PAGE, "json")
    (tmp_path / "aircraft-state.avsc").write_text(schema)
    versions = tmp_path / "schemas" / "aircraft-state-value"
    versions.mkdir(parents=True)
    (versions / "1.avsc").write_text(schema)
    names = [name.removesuffix(".py") for name in write_modules(PAGE, tmp_path)]
    assert len(names) == len(read_blocks(PAGE, "python"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_code_and_the_commands_of_the_page_run(
    modules, database_url, monkeypatch, admin
):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    with serving() as registry:
        monkeypatch.setenv("JOBS_LIB_SCHEMA_REGISTRY_URL", registry.url)
        for block in read_blocks(PAGE, "sh"):
            for line in block.splitlines():
                words = shlex.split(line)
                done = CliRunner().invoke(cli, words[1:])
                assert done.exit_code == 0, (line, done.output)
        # The release that adds the new topic registers it.
        fleet, second = modules("fleet"), modules("fleet2")
        registered = CliRunner().invoke(cli, ["schemas", "register", "fleet2:app"])
        assert "aircraft-state-v2-value" in registered.stdout
        fleet.app.load_schemas()
        state = fleet.Aircraft("N1", 180, fleet.Status.AIRBORNE)
        with psycopg.connect(database_url) as conn:
            second.publish(conn, state, business=12)
        rows = admin.execute(
            "select topic, value from jobs_lib.outbox order by id"
        ).fetchall()
        board = modules("board")
        read = make_decoder("any", dict, "registered", board.app.registry).decode
        assert [(topic, read(value)) for topic, value in rows] == [
            (
                "aircraft-state",
                {"tail": "N1", "seats": 180, "status": "AIRBORNE", "gate": None},
            ),
            (
                "aircraft-state-v2",
                {"registration": "N1", "economy": 168, "business": 12},
            ),
        ]
        assert [one.topic for one in board.app.consumers] == ["aircraft-state"]


FIELD = {"name": "more", "type": "int"}
DEFAULT = {**FIELD, "default": 0}


def test_the_check_judges_each_change_as_the_table_of_the_page_says(modules, tmp_path):
    (schema,) = read_blocks(PAGE, "json")
    base = json.loads(schema)

    def fits(old, new) -> bool:
        for place, fields in (
            ("schemas/aircraft-state-value/1.avsc", old),
            ("aircraft-state.avsc", new),
        ):
            changed = {**base, **fields}
            (tmp_path / place).write_text(json.dumps(changed))
        sys.modules.pop("fleet", None)
        words = ["schemas", "check", "fleet:app", "--against", "schemas"]
        return CliRunner().invoke(cli, words).exit_code == 0

    def with_field(*more):
        return {"fields": [*base["fields"], *more]}

    def with_status(**changes):
        tail, seats, status, gate = base["fields"]
        changed = {**status, "type": {**status["type"], **changes}}
        for name in [name for name, value in changes.items() if value is None]:
            del changed["type"][name]
        return {"fields": [tail, seats, changed, gate]}

    more = ["UNKNOWN", "PARKED", "AIRBORNE", "LOST"]
    done = {
        "a new field with a default": fits({}, with_field(DEFAULT)),
        "a field that always had a default is removed": fits(with_field(DEFAULT), {}),
        "a new field without a default; one without is removed": fits(
            {}, with_field(FIELD)
        )
        or fits(with_field(FIELD), {}),
        "a new symbol of an enum that has a default in every version": fits(
            {}, with_status(symbols=more)
        ),
        "a symbol of an enum without a default": fits(
            with_status(default=None), with_status(symbols=more, default=None)
        ),
        "another type, another unit, another scale": fits(
            with_field(DEFAULT), with_field({**DEFAULT, "type": "long"})
        ),
        "another name": fits({}, {"name": "Plane"}),
    }
    rows = re.findall(r"^\| (a.*?) \| (fits|refused)", TEXT, re.MULTILINE)
    assert {change: said == "fits" for change, said in rows} == done
