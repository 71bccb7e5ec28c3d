"""The oldest packages that pyproject allows, and the newest Python on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("binary", "avro", "django", "otel", "metrics", "devstack", "testing", "web")
OURS = "jobs-lib[postgres]"
"""What all of these include."""
WANTED = f"{ROOT}[{','.join(EXTRAS)}]"
#: The tests below also need these, in any version that fits the others.
TOOLS = ["hatchling", "hypothesis", "pytest-randomly", "pytest-timeout", "pytest-xdist"]
TOOLS += ["sqlalchemy[asyncio]", "asyncpg", "avro", "psycopg2-binary", "trustme"]
TOOLS += ["httpx", "numpy"]
TESTS = ["tests/unit", "tests/security/test_values.py"]
TESTS += [
    f"tests/integration/test_{name}.py"
    for name in (
        *("callers", "django", "django_tasks", "enqueue", "execute", "kit"),
        *("periodic", "schema"),
    )
]
TESTS += ["tests/kafka/test_relay.py", "tests/kafka/test_consumer.py"]
# These share a connection between psycopg's two kinds.
TESTS += ["tests/kafka/test_async_handlers.py"]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)")

SMOKE = """
import importlib, pkgutil, sys, time
import psycopg
import jobs_lib
from jobs_lib import App, Job, Settings
from jobs_lib.postgres.migrate import migrate
from jobs_lib.service.service import Service

for module in pkgutil.walk_packages(jobs_lib.__path__, "jobs_lib."):
    if not module.name.startswith("jobs_lib.migrations"):  # Alembic runs these
        importlib.import_module(module.name)
assert "site-packages" in jobs_lib.__file__, jobs_lib.__file__
url = sys.argv[1]
migrate(url)
app, ran = App("smoke", settings=Settings(database_url=url)), []

@app.job(group="name")
def plain(job: Job, name: str) -> None:
    with job.transaction() as connection:
        connection.execute("select 1")
    ran.append(name)

@app.job()
async def waiting(job: Job, name: str) -> None:
    ran.append(name)

with psycopg.connect(url) as connection:
    plain.enqueue(connection, name="a")
    plain.enqueue_many(connection, [{"name": "b"}] * 3)
    waiting.enqueue(connection, name="c")
service = Service(app, ["executor", "relay"])
service.start()
deadline = time.monotonic() + 60
while len(ran) < 5 and time.monotonic() < deadline:
    time.sleep(0.05)
service.stop()
print(sorted(ran))
"""


def lowest() -> list[str]:
    """A constraint for each package: the lowest version in pyproject."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = list(project["dependencies"])
    for extra in ("postgres", *EXTRAS):
        wanted += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for requirement in wanted:
        if requirement == OURS:
            continue
        match = REQUIREMENT.match(requirement)
        assert match, f"{requirement} has no lowest version"
        # If several entries name a package, such as those of an extra, the highest
        # holds.
        found[match[1]] = max(found.get(match[1], "0"), match[2], key=_as_numbers)
    return [f"{name}=={version}" for name, version in found.items()]


def pythons() -> dict[tuple[int, ...], Path]:
    """The interpreters on this machine, by version: those of the path, and pyenv's."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(":")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += pyenv.glob("versions/*/bin")
    found = {}
    for folder in folders:
        for program in folder.glob("python3.[0-9]*"):
            if re.fullmatch(r"python3\.\d+", program.name):
                # A shim of pyenv may name a version that is not installed.
                asked = run(program, "-c", "import sys; print(*sys.version_info[:3])")
                if asked.returncode == 0:
                    found[tuple(map(int, asked.stdout.split()))] = program
    return found


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        **options,  # type: ignore[call-overload]
    )


def install(python: Path, place: Path, *wanted: str) -> Path:
    """Make a virtual environment with packages in it; return its interpreter."""
    made = run(python, "-m", "venv", place)
    assert made.returncode == 0, made.stderr
    ours = place / "bin" / "python"
    pip = (ours, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    done = run(*pip, *wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    return ours


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_the_lowest_versions_that_pyproject_allows_pass_the_quick_tests(tmp_path):
    constraints = tmp_path / "lowest.txt"
    constraints.write_text("\n".join(lowest()))
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    python = install(base, tmp_path / "venv", "-c", str(constraints), WANTED, *TOOLS)
    done = run(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        # Old packages warn about themselves.
        *("-o", "filterwarnings=default", "-m", "not slow", *TESTS),
        cwd=ROOT,
    )
    # On a busy machine a test may exceed its budget: that does not matter here.
    assert re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr
    assert not re.search(r"\d+ (failed|error)", done.stdout), done.stdout[-5_000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_newest_python_imports_everything_and_runs_jobs(tmp_path, postgres_server):
    version, program = max(pythons().items())
    if version <= sys.version_info[:3]:
        pytest.skip(f"no Python is newer than this one ({sys.version.split()[0]})")
    python = install(program, tmp_path / "venv", WANTED)
    with_database = postgres_server.url_of("postgres")
    done = run(python, "-W", "error", "-c", SMOKE, with_database, cwd=tmp_path)
    assert done.stdout.strip() == "['a', 'b', 'b', 'b', 'c']", done.stderr
    shutil.rmtree(tmp_path / "venv")


def _as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
