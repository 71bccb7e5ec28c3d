"""The URL of a read model's source is checked, and no piece of its password shown."""

from __future__ import annotations

import re
import sys
import types

import pytest

from jobs_lib.cli.main import main
from jobs_lib.settings import default_settings
from tests.support.apps import make_app

WORDS = "readmodel verify verified:app model --table items --key id"


@pytest.fixture
def verify(database_url, admin, monkeypatch, capsys):
    """`verify(url)` compares with a source there; returns exit code and output.

    The model's own database is behind PgBouncer, by its settings.
    """
    admin.execute("create table model (id text primary key, version bigint, n int)")
    app = make_app(database_url, pgbouncer=True, direct_url=database_url)

    @app.read_model("items", table="model", key="id", group="verified")
    def row(record):
        return {"n": record.value["n"]}

    module = types.ModuleType("verified")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verified", module)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    default_settings.cache_clear()

    def run(url: str) -> tuple[int, str]:
        monkeypatch.setenv("SOURCE_DATABASE_URL", url)
        monkeypatch.setattr(sys, "argv", ["jobs-lib", *WORDS.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(str(ended.value.code)), output.out + output.err

    yield run
    default_settings.cache_clear()


@pytest.mark.guarantee("FS2")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:pa/sswordlong@127.0.0.1:1/db",
        "host=127.0.0.1 port=1 password=hu nter2long",
        "postgresql+psycopg://u:pa@sswordlong@127.0.0.1:1/db",
        "mysql://u:sswordlong@127.0.0.1:1/db",
    ],
)
def test_a_source_whose_url_cannot_be_read_is_named_without_its_password(verify, url):
    code, output = verify(url)
    assert code == 2
    assert output.startswith("error: SOURCE_DATABASE_URL cannot be used: the URL ")
    assert not re.search("sswordlong|nter2long|pa/|hu ", output)


def test_the_source_may_have_sqlalchemys_form_and_the_password_is_hidden(verify):
    code, output = verify("postgresql+psycopg://u:sswordlong@127.0.0.1:1/db")
    assert code == 2
    assert "the database at postgresql://u@127.0.0.1:1/db does not answer" in output
    assert "is SOURCE_DATABASE_URL right?" in output
    assert "sswordlong" not in output


def test_the_source_needs_no_pgbouncer_where_the_model_has_one(
    verify, admin, database_url
):
    admin.execute("create table items (id text primary key, version bigint)")
    assert verify(database_url)[0] == 0
