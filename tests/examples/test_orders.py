"""The example of the tutorial: its own tests, its types, and a whole run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from signal import SIGTERM
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest

from tests.docs.test_testing import run_pytest
from tests.support import delete_topics
from tests.support.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ORDERS = ROOT / "examples/orders"
ANSWER = 60.0
"""Seconds: a busy machine may take long for an answer."""


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the example, as readers have it."""
    copy = tmp_path / "orders"
    shutil.copytree(ORDERS, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return copy


def test_the_tests_of_the_orders_pass(project, postgres_server):
    output = run_pytest(project, postgres_server.url)
    assert re.search(r"^=+ 6 passed in ", output, re.MULTILINE), output


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_types_of_the_orders_are_clean(project, checker):
    settings = project / "pyproject.toml"
    text = settings.read_text()
    # Use the library of this checkout, even if another one is installed.
    text = text.replace("[tool.mypy]", f"[tool.mypy]\nmypy_path = {str(ROOT)!r}")
    text = text.replace("[tool.pyright]", f"[tool.pyright]\nextraPaths = ['{ROOT}']")
    settings.write_text(text)
    options = {
        "mypy": ["--cache-dir", f"{ROOT}/.mypy_cache/orders"],  # else 15 s each time
        "pyright": ["--pythonpath", sys.executable],
    }
    done = subprocess.run(
        [sys.executable, "-m", checker, *options[checker]],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_of_the_orders_takes_long_to_read():
    files = [path for path in ORDERS.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(files) >= 10
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > 130} == {}


@pytest.fixture
def env(empty_url, bootstrap_servers, kafka_admin):
    """The environment of all processes of the shop."""
    environment = f"t{uuid.uuid4().hex[:10]}"  # topics and groups for this test alone
    yield {
        "PYTHONPATH": f"{ROOT}:{ORDERS}",
        "JOBS_LIB_DATABASE_URL": empty_url,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
        "JOBS_LIB_ENVIRONMENT": environment,
    }
    delete_topics(kafka_admin, [f"{environment}.order-state"])


@pytest.fixture
def start(run_process, wait_for, env):
    """A function that starts a web server; it returns the process and a client."""

    def serve(app: str, **more: str):
        server = run_process("-m", "uvicorn", app, "--port", "0", env={**env, **more})

        def find_url():
            assert server.running, server.output
            found = (re.search(r"http://[\d.:]+", line) for line in server.errors)
            return next((match[0] for match in found if match), None)

        url = wait_for(find_url, timeout=60, what=f"{app} serves")
        return server, httpx.Client(base_url=url, timeout=ANSWER)

    return serve


@pytest.mark.timeout(240)
def test_orders_are_charged_once_and_shown_by_the_other_service(
    env, start, run_process, wait_for, empty_url
):
    board_env = {"JOBS_LIB_SCHEMA": "board"}
    for command, more in (
        (["alembic", "-c", str(ORDERS / "alembic.ini"), "upgrade", "head"], {}),
        (["jobs_lib.cli", "topics", "apply", "shop.jobs:app"], {}),
        (["jobs_lib.cli", "migrate"], board_env),
    ):
        step = run_process("-m", *command, env={**env, **more})
        assert step.wait(timeout=60) == 0, step.output
    partner = run_process(str(ORDERS / "partner.py"), "0")
    partner_url = partner.wait_for_line(r"http\S+")[0]
    run_process(
        *("-m", "jobs_lib.cli", "run", "shop.jobs:app"),
        env={**env, "PARTNER_URL": partner_url},
    )
    _, shop = start("shop.web:web")
    board_server, board = start("board.web:web", **board_env)
    with shop, board:
        orders = [
            shop.post("/orders", json={"customer": customer, "cents": 100}).json()["id"]
            for customer in ("ada", "bob", "ada", "ada")
        ]
        for order in orders:
            wait_for_state(board, order, "paid", wait_for)
        assert shop.post(f"/orders/{orders[0]}/refund").status_code == 202
        wait_for_state(board, orders[0], "refunded", wait_for)

        def told():
            found = httpx.get(partner_url, timeout=ANSWER).json()
            return found if len(found["done"]["/texts"]) == len(orders) else None

        found = wait_for(told, timeout=60, what="each order has its text")
        # Its read model is new: it is ready at the end that the topic has now.
        wait_for(
            lambda: board.get("/readyz").status_code == 200,
            timeout=60,
            what="the board is ready",
        )
    charged = [one["order"] for one in found["done"]["/charges"].values()]
    assert sorted(charged) == orders
    # The work was requested more often than it was done.
    assert sum(found["calls"].values()) > 2 * len(orders) + 1
    with psycopg.connect(empty_url) as conn:
        wait_for(
            lambda: read_totals(conn) == {"ada": 200, "bob": 100},
            timeout=60,
            what="the totals are added up",
        )
        # Jobs of their own write these, and nothing waits for them.
        wait_for(
            lambda: count_parcels(conn) == 4, timeout=60, what="all parcels are packed"
        )
        board_server.signal(SIGTERM)
        board_server.wait()
        # The process has deleted its row, so no other one waits for its heartbeat to
        # age.
        assert conn.execute("select count(*) from board.processes").fetchone() == (0,)


def wait_for_state(board: httpx.Client, order: int, state: str, wait_for) -> None:
    """Wait until the board shows an order in this state."""

    def shown() -> bool:
        reply = board.get(f"/board/{order}")
        return reply.status_code == 200 and reply.json()["state"] == state

    wait_for(shown, timeout=60, what=f"the board shows order {order} as {state}")


def count_parcels(conn) -> int:
    """Count the parcels, in a transaction of its own."""
    (found,) = conn.execute("select count(*) from parcels").fetchone()
    conn.commit()
    return found


def read_totals(conn) -> dict[str, int]:
    """Read what each customer has paid, in a transaction of its own."""
    rows = conn.execute("select customer, cents from totals").fetchall()
    conn.commit()
    return dict(rows)
