"""A pod starts while PostgreSQL is away, and can be stopped while it waits."""

from __future__ import annotations

import re
import signal
import urllib.request

import pytest

from tests.faults.helpers import count, enqueue
from tests.support.ports import reserve_ports

APP = """
import os, sys, threading
from jobs_lib import App

app = App("starting", home=os.environ.get("HOME_TOPIC"))

@app.job()
def quick(job, n: int) -> None: ...

if "slow" in os.environ:
    print("loading", flush=True)
    threading.Event().wait(60)
"""


@pytest.fixture(params=[("run",), ("executor", "--processes", "2")], ids=" ".join)
def start(request, own_url, tmp_path, run_process):
    """A function that starts a pod as a user does; it returns pod and probes."""
    (tmp_path / "starting.py").write_text(APP)

    def start(**env: str):
        pod = run_process(
            *("-m", "jobs_lib.cli", *request.param, "starting:app"),
            env={
                "PYTHONPATH": str(tmp_path),
                "JOBS_LIB_DATABASE_URL": own_url,
                "JOBS_LIB_PROBES_PORT": str(port),
                **env,
            },
        )

        def is_well(path: str) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}"):
                    return True
            except OSError:
                return False

        return pod, is_well

    # A second process of the pod uses the next port.
    with reserve_ports(2) as port:
        yield start


@pytest.fixture
def away(own_server):
    """Stop the server until the test starts it."""
    own_server.stop(keep_data=True)
    yield own_server
    if not own_server.running:
        own_server.start()


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP6", "J20")
def test_a_pod_waits_for_its_database_and_says_so(own_url, start, away, wait_for):
    pod, is_well = start()
    wait_for(
        lambda: re.search("loop.failed loop=start .*the database at", pod.output),
        timeout=60,
        what=lambda: f"it says what it waits for\n{pod.output}",
    )
    assert pod.running
    # Any of the processes may be the first that waits.
    wait_for(lambda: is_well("/livez"), timeout=60, what="its probes answer")
    assert not is_well("/readyz")
    away.start()
    enqueue(own_url, "quick", 20)
    wait_for(lambda: is_well("/readyz"), timeout=60, what="it is ready")
    wait_for(lambda: count(own_url) == 0, timeout=60, what="the jobs have run")
    pod.signal(signal.SIGTERM)
    assert pod.wait(timeout=60) == 0, pod.output


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("J19", "FP19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_pod_that_waits_for_its_database_ends_in_order_when_asked(
    start, away, wait_for, number
):
    pod, _ = start()
    wait_for(
        lambda: "loop.failed loop=start" in pod.output,
        timeout=60,
        what=lambda: f"it waits\n{pod.output}",
    )
    pod.signal(number)
    assert pod.wait(timeout=60) == 0, pod.output
    assert "Traceback" not in pod.output


@pytest.mark.guarantee("J19", "FP19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_pod_that_is_asked_to_stop_while_its_app_is_loaded_ends_in_order(
    start, number
):
    pod, _ = start(slow="yes")
    pod.wait_for_line("loading", timeout=60)
    pod.signal(number)
    assert pod.wait(timeout=60) == 0, pod.output
    assert "Traceback" not in pod.output


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("J19", "FP19")
def test_a_pod_that_waits_for_kafka_ends_in_order_when_asked(start, wait_for):
    pod, _ = start(JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1", HOME_TOPIC="nowhere")
    wait_for(
        lambda: "loop.failed loop=start" in pod.output,
        timeout=60,
        what=lambda: f"it waits\n{pod.output}",
    )
    pod.signal(signal.SIGTERM)
    assert pod.wait(timeout=60) == 0, pod.output
