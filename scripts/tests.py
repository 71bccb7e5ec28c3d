"""Run the tests as `make test` and `make test-all` do.

All tests run on the embedded PostgreSQL. Several processes share them, file by file,
because most tests wait. With `--all` one process beside them runs the tests of the SQL
on the oldest PostgreSQL installed on this machine. It writes to a file of its own,
which is printed if a test fails there. Else the output ends with pytest's summary of
the main run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jobs_lib.devstack import installed_postgres

ROOT = Path(__file__).parents[1]
EMBEDDED = 18
OLDEST = 14

OLDER_POSTGRES = "a PostgreSQL older than the embedded one"

# Each process has a PostgreSQL and a Kafka of its own, and mostly waits: two for each
# core leave a quarter of it idle.
# Slow tests wait for none: they start whole services.
# tests/support/order.py gives the order in which the files start.
PROCESSORS = os.cpu_count() or 1
PROCESSES = min(6, max(2, PROCESSORS * 3))
SLOW_PROCESSES = min(4, max(2, PROCESSORS))
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
    compile_tests()
    left_out = [f"{program} is not installed" for program in missing()]
    chosen = [] if args.all else ["-m", "not slow"]
    older = older_postgres() if args.all else None
    code = run(chosen) if older is None else run_both(chosen, *older)
    if args.all:
        print("Skipped:" if left_out else "No test was skipped for a missing package.")
        print("".join(f"  {line}\n" for line in left_out), end="")
    return code


def compile_tests() -> None:
    """Let pytest compile the tests of a new clone, a part of them on each processor.

    The processes that run tests import the same files at the same time. Without this,
    each of them would compile all files, which takes longer than to import them.
    """
    if any(ROOT.glob("tests/*/__pycache__")):
        return
    files = sorted(map(str, ROOT.glob("tests/**/test_*.py")))
    parts = [files[number::PROCESSORS] for number in range(PROCESSORS)]
    # Errors are told by the run itself.
    for process in [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", *part],
            env=make_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in parts
        if part
    ]:
        process.wait()


def run(chosen: list[str]) -> int:
    """Run all tests; return pytest's exit code."""
    processes = PROCESSES if chosen else SLOW_PROCESSES
    command = make_command("junit", processes, chosen)
    return subprocess.run(command, env=make_environment(), check=False).returncode


def run_both(chosen: list[str], major: int, bin_dir: Path) -> int:
    """Run all tests, and the SQL's tests on another PostgreSQL beside them."""
    command = make_command(f"junit-postgresql-{major}", 1, chosen)
    command += ["--durations=0", "--durations-min=5", "tests/integration"]
    command += [f"--ignore=tests/integration/{name}" for name in WITHOUT_SQL]
    log = ROOT / "build" / f"postgresql-{major}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"PostgreSQL {major}: tests/integration, into {log}", flush=True)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=make_environment() | {"JOBS_LIB_TEST_POSTGRES_BIN": str(bin_dir)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as beside,
    ):
        code = run(chosen)
    if beside.returncode != 0:
        print(f"PostgreSQL {major}:\n{log.read_text()}", flush=True)
    return code or beside.returncode


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
