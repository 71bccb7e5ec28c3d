"""Several executor processes run under one parent."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.service.limits import ProcessLimits
from jobs_lib.service.supervisor import FAILED
from jobs_lib.settings import load_settings
from tests.support.apps import QUICK, heard, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

# The first child fails, and the second one runs.
FAILING = """
import sys
from jobs_lib.service.supervisor import Supervisor

child = '''
import os, signal, sys
from jobs_lib.service.supervisor import FAILED, end_while_loading
from jobs_lib.service.supervisor import read_share, stop_with_parent

stop_with_parent(lambda: os._exit(1))
if read_share()[0] == 1:
    print("child", *read_share(), flush=True)
    sys.exit(FAILED)
end_while_loading()
signal.pause()
'''
sys.exit(Supervisor([sys.executable, "-c", child], 2).run())
"""
# The signal comes when the first child runs, and the parent does not know it yet.
STARTING = """
import os, signal, subprocess, sys
from jobs_lib.service.supervisor import Supervisor

child = '''
import os, signal
from jobs_lib.service.supervisor import end_while_loading, read_share, stop_with_parent

stop_with_parent(lambda: os._exit(1))
end_while_loading()
signal.pause()
'''

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if options["env"]["JOBS_LIB_SHARE"] == "1/3":
            os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
sys.exit(Supervisor([sys.executable, "-c", child], 3).run())
"""
# One child ends properly; the other one is killed before its end.
KILLED = """
import sys
from jobs_lib.service.supervisor import Supervisor

child = '''
import os, signal
from jobs_lib.service.supervisor import end_while_loading, read_share, stop_with_parent

stop_with_parent(lambda: os._exit(1))
end_while_loading()
if read_share()[0] == 1:
    kill = lambda *_: signal.raise_signal(signal.SIGKILL)
    signal.signal(signal.SIGTERM, kill)
    print("child begins", flush=True)
signal.pause()
'''
sys.exit(Supervisor([sys.executable, "-c", child], 2).run())
"""
# The second child ends its work, and the first one is killed. When that runs again, it
# ends once the parent knows of the other's end.
ENDING = """
import os, sys
from jobs_lib.service.supervisor import Supervisor

child = '''
import os, signal, sys, time
from jobs_lib.service.supervisor import end_while_loading, read_share, stop_with_parent

stop_with_parent(lambda: os._exit(1))
end_while_loading()
# In one piece: the other child writes at the same time.
line = "child {} {}".format(*read_share()) + os.linesep
os.write(1, line.encode())
folder = sys.argv[1]
if read_share()[0] == 2:
    os.symlink(str(os.getpid()), f"{folder}/pid")
    sys.exit()
if not os.path.exists(f"{folder}/killed"):
    open(f"{folder}/killed", "w").close()
    signal.raise_signal(signal.SIGKILL)
while not os.path.islink(f"{folder}/pid"):
    time.sleep(0.01)
while os.path.exists(f"/proc/{os.readlink(f'{folder}/pid')}"):
    time.sleep(0.01)
'''
command = [sys.executable, "-c", child, *sys.argv[1:]]
sys.exit(Supervisor(command, 2, ends=True).run())
"""
# The child has reached its limit, and the machine has no more processes for a moment.
CROWDED = """
import errno, subprocess, sys
from jobs_lib.service.supervisor import Supervisor

child = '''
import os, signal, sys
from jobs_lib.service.supervisor import end_while_loading, stop_with_parent

stop_with_parent(lambda: os._exit(1))
end_while_loading()
print("child begins", flush=True)
try:
    os.mkdir(sys.argv[1] + "/again")
except FileExistsError:
    signal.pause()
'''
tries = 0

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        global tries
        tries += 1
        if tries in (2, 3):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        super().__init__(*arguments, **options)

subprocess.Popen = Popen
sys.exit(Supervisor([sys.executable, "-c", child, *sys.argv[1:]], 1).run())
"""
# The first child's start is refused, and the second one is at work.
REFUSED = FAILING.replace("sys.exit(FAILED)", "sys.exit(2)")
# The same, and the work has an end.
REFUSED_WORK = REFUSED.replace("child], 2)", "child], 2, ends=True)")
# Python runs this first: here a child waits until it has been asked to stop.
CUSTOMIZE = """
import os, signal, time

if "JOBS_LIB_SHARE" in os.environ:
    os.write(1, b"child begins\\n")  # at once, unlike print
    parent = os.getppid()
    while os.getppid() == parent and not signal.sigpending():
        time.sleep(0.01)
"""
LIMIT = 150  # MiB: a process starts with about half of it
APP = """
import os
import threading

from jobs_lib import App, Job

app = App("several")


@app.job(group="group")
def work(job: Job, group: str) -> None:
    with job.transaction() as connection:
        connection.execute("insert into runs values (%s, %s)", (job.id, os.getpid()))


leaked = []


@app.job()
def leak(job: Job) -> None:
    leaked.append(b"x" * 2**20)
    threading.Event().wait(0.005)
    with job.transaction() as connection:
        connection.execute("insert into runs values (%s, %s)", (job.id, os.getpid()))
"""


@pytest.fixture
def admin(connect):
    """A connection for the test to look with, and the table of the runs."""
    connection = connect(autocommit=True)
    connection.execute("create table runs (job bigint, pid int)")
    return connection


@pytest.fixture
def start(tmp_path, database_url, run_process):
    """A function that starts the parent of two executor processes."""
    (tmp_path / "several.py").write_text(APP)

    def start(**settings):
        quick = {
            f"JOBS_LIB_{name.upper()}": str(value)
            for name, value in {**QUICK, **settings}.items()
        }
        root = os.getcwd()
        environment = {
            **quick,
            "JOBS_LIB_DATABASE_URL": database_url,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
        }
        return run_process(
            "-m",
            "jobs_lib.cli",
            "executor",
            "several:app",
            "--processes",
            "2",
            env=environment,
        )

    return start


def enqueue(database_url, connect, jobs: int) -> None:
    app = make_app(database_url)

    @app.job(group="group")
    def work(job: Job, group: str) -> None: ...

    with connect() as connection:
        work.enqueue_many(connection, [{"group": f"g{n}"} for n in range(jobs)])


def pids(admin) -> set[int]:
    """The living processes with the role of an executor."""
    rows = admin.execute(
        "select pid from jobs_lib.processes where 'execute' = any (roles)"
        " and heartbeat_at > clock_timestamp() - interval '1 second'"
    )
    return {row[0] for row in rows}


def await_both(admin, wait_for) -> set[int]:
    """Wait until both processes live, and return them."""
    found: set[int] = wait_for(
        lambda: found if len(found := pids(admin)) == 2 else None,
        timeout=60,
        what="both live",
    )
    return found


def owners(admin) -> int:
    """Count the processes that share all the origins."""
    row = admin.execute(
        "select count(distinct owner), count(*) filter (where owner is null)"
        " from jobs_lib.origins where role = 'execute'"
    ).fetchone()
    return row[0] if row[1] == 0 else 0


@pytest.mark.parametrize("origins", ["", "all"], ids=["by heartbeats", "all"])
def test_two_processes_share_the_work_and_stop_on_one_signal(
    start, admin, database_url, connect, wait_for, origins
):
    parent = start(stale_after=20.0, origins=origins)
    wait_for(lambda: owners(admin) == 2, timeout=60, what="both have their share")
    enqueue(database_url, connect, 200)
    count = "select count(*), count(distinct job), count(distinct pid) from runs"
    wait_for(
        lambda: admin.execute(count).fetchone() == (200, 200, 2),
        timeout=30,
        what="each job ran once, on both processes",
    )
    parent.signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 0
    assert owners(admin) == 0


def test_a_child_that_stops_by_itself_stops_all(run_process):
    parent = run_process("-c", FAILING)
    assert parent.wait(timeout=60) == FAILED
    assert parent.lines.count("child 1 2") == 1


def test_children_that_end_their_work_are_not_started_again(run_process, tmp_path):
    parent = run_process("-c", ENDING, str(tmp_path))
    assert parent.wait(timeout=60) == 0, parent.output
    assert sorted(parent.lines) == ["child 1 2", "child 1 2", "child 2 2"]


def test_a_child_that_cannot_be_started_again_is_tried_until_it_can(
    run_process, tmp_path, wait_for
):
    parent = run_process("-c", CROWDED, str(tmp_path))
    wait_for(
        lambda: parent.lines.count("child begins") == 2,
        timeout=60,
        what=lambda: f"the child is there again\n{parent.output}",
    )
    parent.signal(signal.SIGTERM)
    assert parent.wait(timeout=60) == 0, parent.output


@pytest.mark.parametrize("program", [REFUSED, REFUSED_WORK], ids=["run", "work"])
def test_a_child_whose_start_is_refused_ends_all(run_process, program):
    parent = run_process("-c", program)
    assert parent.wait(timeout=60) == 2
    assert parent.lines.count("child 1 2") == 1


@pytest.mark.guarantee("FP19")
def test_a_signal_while_the_children_are_started_reaches_each(run_process):
    parent = run_process("-c", STARTING)
    assert parent.wait(timeout=60) == 0, parent.output


@pytest.mark.guarantee("FP19")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_children_that_are_asked_to_stop_before_they_have_loaded_end_in_order(
    start, tmp_path, wait_for, number
):
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)
    parent = start()
    wait_for(
        lambda: parent.lines.count("child begins") == 2,
        timeout=60,
        what=lambda: f"both have begun\n{parent.output}",
    )
    parent.signal(number)
    assert parent.wait(timeout=60) == 0
    assert "Traceback" not in parent.output


def test_the_exit_code_shows_the_signal_that_killed_a_stopping_child(run_process):
    parent = run_process("-c", KILLED)
    parent.wait_for_line("child begins")
    parent.signal(signal.SIGTERM)
    assert parent.wait(timeout=60) == 128 + signal.SIGKILL


def test_a_child_that_dies_is_started_again(start, admin, wait_for):
    parent = start()
    before = await_both(admin, wait_for)
    os.kill(min(before), signal.SIGKILL)
    wait_for(
        lambda: len(found := pids(admin)) == 2 and found != before,
        timeout=60,
        what=lambda: f"another one lives\n{parent.output}",
    )


@pytest.mark.slow
@pytest.mark.guarantee("FP17")
def test_a_process_whose_handlers_leak_is_replaced_in_order(
    start, admin, database_url, connect, wait_for
):
    parent = start(workers=1, max_memory=LIMIT, stale_after=20.0)
    wait_for(lambda: owners(admin) == 2, timeout=60, what="both have their share")
    app = make_app(database_url)

    @app.job()
    def leak(job: Job) -> None: ...

    def leak_all(jobs: int) -> None:
        with connect() as connection:
            leak.enqueue_many(connection, [{}] * jobs)
        wait_for(
            lambda: (
                admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)
            ),
            timeout=60,
            what=lambda: f"all have run\n{parent.output}",
        )

    leak_all(200)
    wait_for(
        lambda: parent.output.count("process.started") > 2 and owners(admin) == 2,
        timeout=60,
        what=lambda: f"one is replaced\n{parent.output}",
    )
    leak_all(200)
    count = "select count(*), count(distinct job), count(distinct pid) > 2 from runs"
    assert admin.execute(count).fetchone() == (400, 400, True)
    # No job was cut off: each has run at its first attempt, and no process died.
    ended = admin.execute("select distinct outcome, attempt from jobs_lib.history")
    assert ended.fetchall() == [("completed", 1)]
    assert "died" not in parent.output
    told = re.findall(r"process.worn rss_mb=([\d.]+) jobs=(\d+)", parent.output)
    assert told
    assert all(float(rss) > LIMIT and int(ran) > 0 for rss, ran in told)


def test_a_process_is_measured_and_compared_with_its_limits():
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"max_memory": 1}, True),
        ({"max_memory": 1e6}, False),
    ]
    cases += [({"max_jobs": 100}, True), ({"max_jobs": 101}, False)]
    with heard("process.measured") as measured:
        for limits, over in cases:
            assert ProcessLimits(load_settings(**limits), lambda: 100).is_over() == over
    assert len(measured) == len(cases)
    assert all(m["rss_mb"] > 10 and m["jobs"] == 100 for _, m in measured)


@pytest.mark.guarantee("FP20")
def test_the_children_of_a_killed_parent_stop(start, admin, wait_for):
    parent = start()
    children = await_both(admin, wait_for)
    os.kill(parent.pid, signal.SIGKILL)

    def gone() -> bool:
        return not any(os.path.exists(f"/proc/{pid}") for pid in children)

    wait_for(gone, timeout=30, what="the children are gone")
