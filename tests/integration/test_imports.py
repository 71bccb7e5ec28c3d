"""Declaring loads no database driver, and enqueueing loads no Kafka client."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import jobs_lib
import jobs_lib.testing

ENQUEUE = """
import sys
import psycopg
from jobs_lib import App, Job, Record
from jobs_lib.settings import Settings

app = App("shop", home="orders", settings=Settings(database_url=sys.argv[1]))
states = app.topic("states", value=int, compacted=True)

@app.job()
def ship(job: Job, order: int) -> None: ...

@app.consumer("orders", group="shop", value=int)
def handle(record: Record[int], connection) -> None: ...

@app.read_model("orders", table="model", key="id", group="model")
def row(record): ...

with psycopg.connect(sys.argv[1]) as connection:
    connection.execute("select 1")
    assert ship.enqueue(connection, order=1)
    ship.enqueue_many(connection, [{"order": 2}])
    assert states.send(connection, key="a", value=1)
with app.transaction() as connection:
    ship.enqueue(connection, order=3)
app.close()
loaded = [name for name in sys.modules if name.startswith("confluent_kafka")]
assert not loaded, loaded
print("enqueued")
"""

PLUGIN = """
import sys

def test_nothing_is_loaded():
    heavy = ("psycopg", "pydantic", "sqlalchemy", "confluent_kafka", "jobs_lib.")
    ours = {"jobs_lib.version", "jobs_lib.testing", "jobs_lib.testing.plugin"}
    loaded = {name for name in sys.modules if name.startswith(heavy)} - ours
    assert "jobs_lib.testing.plugin" in sys.modules
    assert not loaded, loaded
"""


# Commands, workers and tests of an application import it many times a day.
IMPORT = """
import sys
from jobs_lib import App, Draft, Gone, Item, Job, JobsError, Rate, Record, Retry, Snooze

heavy = {
    "alembic",
    "asyncio",  # and ssl with it
    "confluent_kafka",
    "psutil",
    "psycopg",
    "psycopg_pool",
    "pydantic",
    "pydantic_core",
    "pydantic_settings",
    "sqlalchemy",
}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""

# Pydantic reads the signatures, so that a declaration refuses a wrong one.
DECLARE = """
import sys
from jobs_lib import App, Job, Rate, Record

app = App("shop", home="orders")
states = app.topic("states", value=int, compacted=True)

@app.periodic("0 3 * * *", payload={"order": 1})
@app.job(group="order", rate=Rate(5), retry=3)
def ship(job: Job, order: int) -> None: ...

@app.job()
async def tell(job: Job, order: int) -> None: ...

@app.consumer("orders", group="shop", value=int)
def handle(record: Record[int], connection) -> None: ...

heavy = {
    "alembic",
    "confluent_kafka",
    "psycopg",
    "psycopg_pool",
    "pydantic_settings",
    "sqlalchemy",
}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""

WITHOUT_LIBPQ = """
import ctypes.util
import sys

sys.modules["psycopg_binary"] = sys.modules["psycopg_c"] = None
ctypes.util.find_library = lambda name: None
"""

WITHOUT_DRIVERS = """
import sys

for name in ("psycopg", "psycopg_pool", "sqlalchemy", "alembic"):
    sys.modules[name] = None
"""
NEEDS = "jobs_lib needs {}: pip install 'jobs-lib[postgres]', or 'jobs-lib[binary]' "
NEEDS += "with a libpq"

COMMAND = """
import sys
from jobs_lib.cli.main import main

sys.argv[0] = "jobs-lib"
main()
"""


def run(*arguments, cwd=None, **environment) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.guarantee("W51")
def test_the_import_of_an_app_loads_no_heavy_library():
    done = run("-c", IMPORT)
    assert done.returncode == 0, done.stderr


def test_a_module_that_only_declares_loads_no_driver_and_no_settings():
    done = run("-c", DECLARE)
    assert done.returncode == 0, done.stderr


def test_importing_an_app_without_libpq_names_the_package_to_install():
    done = run("-c", WITHOUT_LIBPQ + "from jobs_lib import App")
    assert done.returncode == 1
    assert "no pq wrapper" in done.stderr
    assert "libpq is missing: pip install 'jobs-lib[binary]'" in done.stderr


def test_a_command_without_libpq_names_the_package_in_one_line():
    done = run("-c", WITHOUT_LIBPQ + COMMAND, "migrate")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: libpq is missing: pip install 'jobs-lib[bin")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "code",
    [
        *("import jobs_lib; jobs_lib.App('shop')", "from jobs_lib import Service"),
        *("from jobs_lib import migrate", "from jobs_lib import capture_changes"),
        *("from jobs_lib.testing import Jobs", "from jobs_lib.web import reexports"),
        "from jobs_lib.operating import explain",
    ],
)
def test_what_needs_a_database_without_a_driver_says_what_to_install(code):
    done = run("-c", WITHOUT_DRIVERS + code)
    assert done.returncode == 1
    told = NEEDS.format("psycopg")
    (*_, last) = done.stderr.splitlines()
    assert last == f"jobs_lib.errors.ConfigurationError: {told}"
    assert done.stderr.count("Traceback") == 1


APP = """
import psycopg
from jobs_lib import App

app = App("shop")
"""


@pytest.mark.parametrize(
    "words",
    [
        *(["migrate"], ["migrate", "--sql"], ["run", "shop:app"]),
        *(["executor", "shop:app"], ["topics", "plan", "shop:app"]),
        *(["jobs", "list"], ["grants", "executor"], ["reexport", "status"]),
    ],
    ids=" ".join,
)
def test_a_command_without_a_driver_says_what_to_install_in_one_line(tmp_path, words):
    (tmp_path / "shop.py").write_text(APP)
    done = run("-c", WITHOUT_DRIVERS + COMMAND, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: {NEEDS.format('psycopg')}\n"
    assert not done.stdout


def test_the_pool_alone_may_be_missing(tmp_path):
    code = "import sys; sys.modules['psycopg_pool'] = None\n"
    done = run("-c", code + "import psycopg; from jobs_lib import App")
    assert done.stderr.splitlines()[-1].endswith(NEEDS.format("psycopg_pool"))
    done = run("-c", code + COMMAND, "run", "shop:app", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert NEEDS.format("psycopg_pool") in done.stderr


# A whole environment may name a database that this process has nothing to do with.
SHARED = """
from jobs_lib import ConfigurationError, Settings
from jobs_lib.coordination import Consumer, Member

assert Settings(database_url="postgresql://u:p@h:1/d").database_url
"""


def test_without_a_driver_coordination_and_the_list_of_commands_work():
    done = run("-c", WITHOUT_DRIVERS + SHARED)
    assert done.returncode == 0, done.stderr
    for words in (["--help"], ["coordination", "show", "--help"], ["run", "--help"]):
        done = run("-c", WITHOUT_DRIVERS + COMMAND, *words)
        assert done.returncode == 0, done.stderr
    done = run("-c", WITHOUT_DRIVERS + COMMAND, "coordination", "show")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no Kafka broker is set")


def test_a_program_that_only_enqueues_and_sends_loads_no_kafka_client(database_url):
    done = run("-c", ENQUEUE, database_url)
    assert done.stdout == "enqueued\n", done.stderr


def test_a_run_of_pytest_that_uses_no_fixture_of_ours_loads_nothing_of_ours(tmp_path):
    (tmp_path / "test_it.py").write_text(PLUGIN)
    # Its entry point runs so, without other plugins that load a driver themselves.
    done = run(
        *("-m", "pytest", "-q", "-p", "jobs_lib.testing.plugin", "test_it.py"),
        cwd=tmp_path,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert done.returncode == 0, done.stdout


def test_each_public_name_is_found():
    for module in (jobs_lib, jobs_lib.testing):
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert set(module.__all__) <= set(dir(module))
        assert not hasattr(module, "no_such_name")


HELP = """
import sys
from click.testing import CliRunner
from jobs_lib.cli.main import LazyGroup, cli

shown = CliRunner().invoke(cli, ["--help"])
assert shown.exit_code == 0, shown.output
heavy = ("psycopg", "pydantic", "sqlalchemy", "confluent_kafka", "rich", "pyspark")
loaded = {name.partition(".")[0] for name in sys.modules} & {*heavy}
assert not loaded, loaded
for name, text in LazyGroup.texts.items():
    assert f"{name}  " in shown.output and text[:40] in shown.output, name
assert LazyGroup.texts.keys() == LazyGroup._modules.keys()
"""


def test_the_list_of_commands_loads_none_of_them():
    done = run("-c", HELP)
    assert done.returncode == 0, done.stderr


SERVICE = """
import sys
import jobs_lib.service.service

loaded = {"sqlalchemy", "alembic", "rich", "pyspark"} & {*sys.modules}
assert not loaded, loaded
"""


def test_a_service_loads_nothing_that_only_migrations_and_commands_need():
    done = run("-c", SERVICE)
    assert done.returncode == 0, done.stderr
