"""Schemas are checked and registered when a service is deployed."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from jobs_lib import App, ConfigurationError
from jobs_lib.cli.main import cli
from jobs_lib.operating.schemas import check_against, check_schemas, register_schemas
from jobs_lib.settings import load_settings
from tests.support.registry import serving

SUBJECT = "aircraft-state-value"
TAIL = {"name": "tail", "type": "string"}
SEATS = {"name": "seats", "type": "int"}
SEATS_OR_0 = {**SEATS, "default": 0}
GATE = {"name": "gate", "type": ["null", "string"], "default": None}


def aircraft(*fields) -> dict[str, Any]:
    return {"type": "record", "name": "Aircraft", "fields": [*fields]}


@pytest.fixture
def registry():
    """A registry that compares nothing."""
    with serving() as registry:
        yield registry


@pytest.fixture
def declare(registry):
    """A function that makes an app with a topic whose schema has these fields."""

    def declare(*fields) -> App:
        settings = load_settings(schema_registry_url=registry.url)
        app = App("fleet", settings=settings)
        app.topic("aircraft-state", schema=aircraft(*fields), compacted=True)
        app.topic("events")
        return app

    return declare


@pytest.fixture
def invoke(monkeypatch):
    """A function that runs `jobs-lib schemas …` on an app."""

    def invoke(app, *words):
        service = ModuleType("fleet_service")
        monkeypatch.setattr(service, "app", app, raising=False)
        monkeypatch.setitem(sys.modules, "fleet_service", service)
        first, *others = words
        arguments = ["schemas", first, "fleet_service:app", *others]
        return CliRunner().invoke(cli, arguments)

    return invoke


def places(findings) -> list[tuple[int | None, str, bool]]:
    return [(one.version, one.field, one.fails) for one in findings]


@pytest.mark.guarantee("W80")
@pytest.mark.parametrize("gone", [True, False])
def test_a_required_field_is_held_against_every_version(registry, declare, gone):
    # Only the first version differs from it, in either direction.
    first = aircraft(TAIL, SEATS) if gone else aircraft(TAIL)
    registry.add(SUBJECT, first)
    names = [f"more{n}" for n in range(4)]
    for n in range(1, 5):
        more = [{"name": one, "type": "int", "default": 0} for one in names[:n]]
        registry.add(SUBJECT, aircraft(TAIL, SEATS_OR_0, *more))
    app = declare(TAIL) if gone else declare(TAIL, SEATS)
    assert places(check_schemas(app)) == [(1, "seats", True)]
    assert places(check_schemas(declare(TAIL, SEATS_OR_0))) == []


def test_a_deployment_with_a_schema_that_does_not_fit_fails(registry, declare, invoke):
    registry.add(SUBJECT, aircraft(TAIL, SEATS))
    done = invoke(declare(TAIL), "register")
    assert done.exit_code == 1
    for text in (SUBJECT, "seats", "consumers of version 1", "new topic"):
        assert text in done.stdout
    assert len(registry.subjects[SUBJECT]) == 1
    assert not [asked for asked in registry.asked if asked.startswith("PUT")]
    done = invoke(declare(TAIL, SEATS, {**GATE}), "register")
    assert done.exit_code == 0, done.output
    assert "registered: aircraft-state-value (id 2)" in done.stdout
    assert len(registry.subjects[SUBJECT]) == 2


def test_no_schema_is_registered_unless_all_fit(registry, declare):
    app = declare(TAIL)
    app.topic("flights", schema=aircraft(TAIL, SEATS))
    registry.add("flights-value", aircraft(TAIL))
    findings, ids = register_schemas(app)
    assert places(findings) == [(1, "seats", True)]
    assert ids == {}
    assert SUBJECT not in registry.subjects


@pytest.mark.parametrize("known", [True, False])
def test_a_subject_without_a_level_is_set_to_full_transitive(registry, declare, known):
    if known:
        registry.add(SUBJECT, aircraft(TAIL))
    app = declare(TAIL, GATE)
    assert check_schemas(app) == []
    assert registry.levels == {"": "BACKWARD"}
    _, ids = register_schemas(app)
    assert registry.levels == {"": "BACKWARD", SUBJECT: "FULL_TRANSITIVE"}
    # Registering the same again changes nothing, and the service finds its schemas.
    assert register_schemas(app) == ([], ids)
    assert len(registry.subjects[SUBJECT]) == 1 + known
    app.load_schemas()


@pytest.mark.guarantee("W81")
@pytest.mark.parametrize("of", [SUBJECT, ""])
def test_forward_transitive_suffices_with_a_full_export(registry, declare, invoke, of):
    registry.levels[of] = "FORWARD_TRANSITIVE"
    registry.add(SUBJECT, aircraft(TAIL))
    # Consumers of version 1 can read this, but version 1 cannot be read with it.
    done = invoke(declare(TAIL, SEATS), "check")
    assert done.exit_code == 0, done.output
    assert "FORWARD_TRANSITIVE" in done.stdout
    assert "full re-export after each upgrade" in done.stdout
    _, ids = register_schemas(declare(TAIL, SEATS))
    assert [*ids] == [SUBJECT]
    assert registry.levels[of] == "FORWARD_TRANSITIVE"
    # The fields that consumers of earlier versions need are still checked.
    assert (1, "tail", True) in places(check_schemas(declare(SEATS)))


@pytest.mark.parametrize("level", ["BACKWARD", "FULL", "NONE", "BACKWARD_TRANSITIVE"])
def test_a_level_that_does_not_protect_every_consumer_is_a_finding(
    registry, declare, level
):
    registry.levels[SUBJECT] = level
    (finding,) = check_schemas(declare(TAIL))
    assert finding.fails
    assert level in finding.problem
    assert "set it to FULL_TRANSITIVE" in finding.problem
    assert register_schemas(declare(TAIL))[1] == {}


def test_versions_in_a_folder_need_no_registry(registry, declare, invoke, tmp_path):
    app = declare(TAIL, SEATS)
    assert check_against(app, tmp_path) == []
    folder = tmp_path / SUBJECT
    folder.mkdir()
    for version, schema in [(2, aircraft(TAIL, SEATS)), (10, aircraft(TAIL))]:
        (folder / f"{version}.avsc").write_text(json.dumps(schema))
    assert places(check_against(app, tmp_path)) == [(10, "seats", True)]
    done = invoke(app, "check", "--against", str(tmp_path), "--json")
    assert done.exit_code == 1
    assert [one["version"] for one in json.loads(done.stdout)] == [10]
    forward = invoke(app, "check", "--against", str(tmp_path), "--forward")
    assert forward.exit_code == 0, forward.output
    assert invoke(app, "check", "--forward").exit_code == 2
    assert registry.asked == []


def test_a_missing_folder_or_an_unusable_file_is_an_error(declare, tmp_path):
    app = declare(TAIL)
    with pytest.raises(ConfigurationError, match="no folder"):
        check_against(app, tmp_path / "nowhere")
    (tmp_path / SUBJECT).mkdir()
    for name, text in [("1", "{"), ("one", '"int"'), ("2", '{"type": "nonsense"}')]:
        file = tmp_path / SUBJECT / f"{name}.avsc"
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=rf"{name}\.avsc is not usable"):
            check_against(app, tmp_path)
        file.unlink()


def test_an_app_without_schemas_needs_no_registry(invoke):
    app = App("fleet", settings=load_settings())
    app.topic("events")
    for command in ("check", "register"):
        done = invoke(app, command)
        assert (done.exit_code, done.output) == (0, "")


def test_each_environment_has_subjects_of_its_own(registry):
    settings = load_settings(schema_registry_url=registry.url, environment="dev")
    app = App("fleet", settings=settings)
    app.topic("aircraft-state", schema=aircraft(TAIL))
    register_schemas(app)
    assert [*registry.subjects] == ["dev.aircraft-state-value"]
