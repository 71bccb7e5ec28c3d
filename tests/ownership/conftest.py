"""A process that has been silent for a long time."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest


@pytest.fixture
def silent(admin) -> UUID:
    """The id of the owner of `t/1`; its last heartbeat was long ago."""
    process = uuid4()
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version,"
        " heartbeat_at) values (%s, 'pod', '{execute}', 'host', 1, '0',"
        " now() - interval '1 minute')",
        (process,),
    )
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('execute', 't/1', %s, 1)",
        (process,),
    )
    return process
