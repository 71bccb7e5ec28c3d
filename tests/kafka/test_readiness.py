"""`/readyz` follows PostgreSQL and Kafka; `/livez` does not."""

from __future__ import annotations

from functools import partial

import pytest

from jobs_lib.devstack.ports import free_port
from tests.support.apps import make_app, running
from tests.support.probes import ask_probe

pytestmark = pytest.mark.expects("loop.failed", "fenced", "origins.lost")


@pytest.fixture
def ask(port):
    """Ask the service."""
    return partial(ask_probe, port)


@pytest.fixture
def port(database_url, database_proxy, own_broker):
    """Where a service answers that runs behind proxies of its two servers."""
    port = free_port()
    topic = own_broker.create()
    app = make_app(
        database_proxy.url(database_url),
        kafka_bootstrap_servers=own_broker.proxied,
        database_timeout=2,
        probes_port=port,
    )

    @app.consumer(topic, group=topic)
    def handle(record, conn) -> None: ...

    with running(app, "consumers", "relay"):
        yield port


@pytest.mark.guarantee("O2")
@pytest.mark.parametrize("server", ["PostgreSQL", "Kafka"])
def test_a_process_is_not_ready_while_a_server_is_silent(
    ask, server, database_proxy, own_broker, wait_for
):
    proxy = database_proxy if server == "PostgreSQL" else own_broker.proxy
    wait_for(lambda: ask("/readyz") == (200, "ready"), timeout=60, what="it is ready")
    proxy.hold()
    wait_for(
        lambda: ask("/readyz") == (503, f"{server} does not answer"),
        timeout=60,
        what="it is not ready",
    )
    assert ask("/livez") == (200, "live")
    proxy.release()
    wait_for(lambda: ask("/readyz") == (200, "ready"), timeout=60, what="it is again")
    assert ask("/livez") == (200, "live")
