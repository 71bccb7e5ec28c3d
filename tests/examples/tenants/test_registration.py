"""The provider is called for each tenant, whatever happens amid the call."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.tenants import Stage, make_form

ESTABLISHED = "01"


@pytest.fixture(scope="module")
def stage(make_stage) -> Stage:
    """The API alone."""
    made = make_stage()
    made.start_api()
    return made


def has_unread(address: str) -> bool:
    """Whether a server has a request that it has not read."""
    port = int(address.rpartition(":")[2])
    for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        place, unread = (int(one.rpartition(":")[2], 16) for one in (local, queues))
        if (place, state) == (port, ESTABLISHED) and unread:
            return True
    return False


@pytest.mark.slow
@pytest.mark.expects("fenced")
@pytest.mark.guarantee("T4")
def test_a_tenant_is_registered_once_if_the_processor_dies_amid_the_call(
    stage, http, wait_for
):
    provider, processor = stage.start_provider(), stage.start_processor()
    provider.signal(signal.SIGSTOP)
    key = http.post("/tenants", json=make_form("ada")).json()["id"]
    wait_for(
        lambda: has_unread(stage.env["PROVIDER_ADDRESS"]),
        timeout=60,
        what=lambda: f"the provider is called\n{stage.output}",
    )
    processor.kill()
    # The provider registers the tenant of a call whose caller is gone.
    provider.signal(signal.SIGCONT)
    wait_for(stage.read_registrations, timeout=60, what="the tenant is registered")
    missing = "select count(*) from registrations where registered_at is null"
    assert stage.ask(missing) == [(1,)]
    stage.start_processor()
    stage.await_registrations()
    assert stage.read_registrations() == [key]
