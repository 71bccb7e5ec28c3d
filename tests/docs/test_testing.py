"""The service and the tests of docs/testing.md, in a project of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support.pages import ROOT, read_blocks, write_modules

if TYPE_CHECKING:
    from pathlib import Path

THIS_CHECKOUT = ["-p", "no:jobs_lib", "-p", "jobs_lib.testing.plugin"]


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with the files of the page."""
    written = write_modules("docs/testing.md", tmp_path)
    assert written == ["shop.py", "conftest.py", "test_shop.py", "server.py"]
    (settings,) = read_blocks("docs/testing.md", "toml")
    (tmp_path / "pyproject.toml").write_text(settings)
    return tmp_path


def run_pytest(folder: Path, url: str) -> str:
    """Return what pytest prints in a folder, with the tests' own server."""
    (folder / "given_server.py").write_text(
        "import pytest\n\n\n@pytest.fixture(scope='session')\n"
        f"def jobs_server_url():\n    return {url!r}\n"
    )
    return run_pytest_with(folder, "-p", "given_server")


def run_pytest_with(folder: Path, *options: str) -> str:
    """Return what pytest prints in a folder."""
    command = [sys.executable, "-m", "pytest", *THIS_CHECKOUT, *options]
    done = subprocess.run(
        [*command, "-p", "no:randomly"],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


@pytest.mark.guarantee("J23")
def test_the_tests_of_the_page_pass_and_leave_nothing(
    project, postgres_server, database_names
):
    before = database_names()
    output = run_pytest(project, postgres_server.url)
    assert re.search(r"^=+ 4 passed in ", output, re.MULTILINE), output
    assert database_names() == before


def test_a_server_of_pytest_postgresql_serves_as_well(
    project, postgres_server, database_names
):
    before = database_names()
    at = urlsplit(postgres_server.url)
    given = {"host": at.hostname, "port": at.port, "user": at.username}
    given["password"] = at.password
    options = [f"--postgresql-{name}={value}" for name, value in given.items()]
    output = run_pytest_with(project, "-p", "server", *options)
    assert re.search(r"^=+ 4 passed in ", output, re.MULTILINE), output
    assert database_names() == before


def test_the_tests_of_the_page_fail_when_the_service_is_wrong(project, postgres_server):
    shop = project / "shop.py"
    code = shop.read_text().replace("key=str(order)", "key='8'")
    call = "send_invoice.enqueue(conn, customer=customer, order=order)"
    shop.write_text(code.replace(call, "pass"))
    output = run_pytest(project, postgres_server.url)
    assert "no job send_invoice(customer='ada', order=7) is enqueued" in output
    assert "nothing was sent to 'orders' with the key '7'; sent were" in output
    assert re.search(r"^=+ 2 failed, 2 passed in ", output, re.MULTILINE), output


def test_the_plugin_loads_no_database_code_before_a_test_needs_it(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\n\ndef test_plain():\n"
        "    assert 'jobs_lib.testing.databases' not in sys.modules\n\n\n"
        "def test_without_an_app(jobs):\n    pass\n"
    )
    output = run_pytest(tmp_path, "postgresql://nobody@127.0.0.1:1/none")
    assert " 1 passed, 1 error in " in output
    assert 'set the pytest option jobs_lib_app, as in jobs_lib_app = "service:app"' in (
        " ".join(output.split())
    )


@pytest.fixture
def database_names(connect):
    """A function that returns the names of the server's databases."""
    admin = connect(autocommit=True)

    def read() -> set[str]:
        rows = admin.execute("select datname from pg_database").fetchall()
        return {name for (name,) in rows}

    return read
