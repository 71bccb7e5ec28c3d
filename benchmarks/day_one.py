"""A newcomer's first day: the way to a first job, seconds to import, lines in the log.

``python -m benchmarks.day_one`` prints one JSON line. The CPU seconds are the medians
of several runs. `idle_lines_in_an_hour` is counted over a shorter time and scaled.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.first_job import measure_first_job
from jobs_lib.devstack import KafkaBroker, PostgresServer

ROOT = Path(__file__).parents[1]
_RUNS = 9
_STARTED = b"origins.taken"
_SERVICE = """
from jobs_lib import App, Job

app = App("first", home="orders")
orders = app.topic("orders", value=int)
states = app.topic("states", value=int, compacted=True)

@app.consumer("orders", group="first")
def handle(record, connection) -> None: ...

@app.job()
def work(job: Job) -> None: ...
"""


@click.command()
@click.option("--idle", default=60.0, show_default=True, help="Seconds to stand idle.")
def main(idle: float) -> None:
    """Measure day one on this machine."""
    figures = {
        "import_cpu_s": _measure_cpu("-c", "from jobs_lib import App, Job"),
        "declare_cpu_s": _measure_cpu("-c", _SERVICE),
        "help_cpu_s": _measure_cpu("-m", "jobs_lib.cli", "--help"),
        **_count_lines(idle),
        **measure_first_job(),
    }
    click.echo(json.dumps(figures))


def _measure_cpu(*arguments: str) -> float:
    """The median of the CPU seconds of Python with these arguments."""
    took = []
    for _ in range(_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(statistics.median(took), 3)


def _count_lines(idle: float) -> dict[str, float]:
    """Lines of a first start against new servers, and of an idle pod after it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "first.py").write_text(_SERVICE)
        with PostgresServer() as database, KafkaBroker() as broker:
            environment = {
                **os.environ,
                "JOBS_LIB_DATABASE_URL": database.url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            }

            def run(*arguments: str) -> None:
                command = [sys.executable, "-m", "jobs_lib.cli", *arguments]
                subprocess.run(
                    command,
                    check=True,
                    env=environment,
                    cwd=folder,
                    stdout=subprocess.DEVNULL,
                )

            run("migrate")
            run("topics", "apply", "first:app")
            log = path / "log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "jobs_lib.cli", "run", "first:app"],
                    env=environment,
                    cwd=folder,
                    stderr=out,
                )
            try:
                until = time.monotonic() + 60
                # Three roles: the consumer's, the executor's and the relay's.
                while log.read_bytes().count(_STARTED) < 3:
                    if time.monotonic() > until:
                        raise click.ClickException(log.read_text())
                    time.sleep(0.1)
                time.sleep(1)
                first = log.read_bytes().count(b"\n")
                time.sleep(idle)
                more = log.read_bytes().count(b"\n") - first
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()
    return {"first_start_lines": first, "idle_lines_in_an_hour": more * 3_600 / idle}


if __name__ == "__main__":
    main()
