"""Run the tests as `make test` and `make test-all` do.

All tests run on the embedded PostgreSQL. Several processes share them, file by file,
because most tests wait. Beside them one process runs the tests of the SQL on the oldest
PostgreSQL installed on this machine. What it says comes indented, in one piece, when it
ends. It is done long before the others, so the output ends with pytest's summary of the
main run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent

from jobs_lib.devstack import installed_postgres

ROOT = Path(__file__).parents[1]
EMBEDDED = 18
OLDEST = 14

OLDER_POSTGRES = "a PostgreSQL older than the embedded one"

# Each process has a PostgreSQL and a Kafka of its own, and waits for a third of its
# time. tests/support/order.py gives the order in which the files start.
PROCESSES = min(6, max(2, (os.cpu_count() or 1) * 3 // 2))
BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]

# Files whose subject does not depend on the server.
WITHOUT_SQL = ["test_commands.py", "test_periodic.py"]

# Programs that some tests need and no wheel contains, each with its Debian package.
PROGRAMS = {
    "pgbouncer": "pgbouncer",
    "faketime": "faketime",
    OLDER_POSTGRES: "postgresql",
}


def main() -> int:
    """Run the tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run the tests on two PostgreSQLs.")
    parser.add_argument("--all", action="store_true", help="run the slow tests too")
    args = parser.parse_args()
    if args.all:
        install(missing())
    os.chdir(ROOT)
    left_out = [f"{program} is not installed" for program in missing()]
    chosen = [] if args.all else ["-m", "not slow"]
    older = older_postgres()
    if older is None:
        print("No older PostgreSQL is installed: tests run on the embedded one only.")
        code = run(chosen)
    else:
        with ThreadPoolExecutor() as beside:
            on_older = beside.submit(run_older, chosen, *older)
            code = run(chosen)
        code = code or on_older.result()
    if args.all:
        print("Skipped:" if left_out else "No test was skipped for a missing package.")
        print("".join(f"  {line}\n" for line in left_out), end="")
    return code


def run(chosen: list[str]) -> int:
    """Run all tests; return pytest's exit code."""
    command = make_command("junit", PROCESSES, chosen)
    return subprocess.run(command, env=make_environment(), check=False).returncode


def run_older(chosen: list[str], major: int, bin_dir: Path) -> int:
    """Run the SQL's tests on another PostgreSQL; print all at the end."""
    command = make_command(f"junit-postgresql-{major}", 1, chosen)
    command += ["--durations=0", "--durations-min=5", "tests/integration"]
    command += [f"--ignore=tests/integration/{name}" for name in WITHOUT_SQL]
    done = subprocess.run(
        command,
        env=make_environment() | {"JOBS_LIB_TEST_POSTGRES_BIN": str(bin_dir)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    told = indent(done.stdout, "    ")
    print(f"\nPostgreSQL {major}: tests/integration\n{told}", flush=True)
    return done.returncode


def make_command(report: str, processes: int, chosen: list[str]) -> list[str]:
    """Make the command of a run that so many processes share."""
    return [
        *(sys.executable, "-m", "pytest", "-n", str(processes), *BY_FILE, *chosen),
        f"--junit-xml=build/{report}.xml",
    ]


def make_environment() -> dict[str, str]:
    """Make the environment of a run."""
    environment = dict(os.environ)
    # The tests start hundreds of processes: each would compile all modules again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def older_postgres() -> tuple[int, Path] | None:
    """The oldest supported PostgreSQL installed that is older than the embedded one."""
    installed = sorted(installed_postgres().items())
    return next((found for found in installed if OLDEST <= found[0] < EMBEDDED), None)


def missing() -> list[str]:
    """The programs that are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    found = {
        "pgbouncer": shutil.which("pgbouncer", path=path),
        "faketime": shutil.which("faketime", path=path),
        OLDER_POSTGRES: older_postgres(),
    }
    return [program for program in PROGRAMS if found[program] is None]


def install(programs: list[str]) -> None:
    """Install these programs by apt; do nothing without root or apt."""
    if not programs or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    # RUNLEVEL=1 keeps Debian from starting the servers; the tests start their own.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    packages = [PROGRAMS[program] for program in programs]
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode != 0:
            print(
                f"{' '.join(command)} failed: tests that need it are skipped",
                file=sys.stderr,
            )
            return


if __name__ == "__main__":
    sys.exit(main())
