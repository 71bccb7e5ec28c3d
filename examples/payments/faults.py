"""What goes wrong in the demo, one fault after the other."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from examples.flights.servers import DEADLINE
from examples.payments.servers import GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from examples.payments.servers import Servers
    from examples.payments.services import Service

REFRESH = 0.25
SESSION_TIMEOUT = 6.0
AWAY = SESSION_TIMEOUT + 2.0
"""For how long a service is away: the others of its group take its partitions."""
SETTINGS = {
    "JOBS_LIB_GATE_REFRESH": f"{REFRESH:g}",
    "JOBS_LIB_SESSION_TIMEOUT": f"{SESSION_TIMEOUT:g}",
    "JOBS_LIB_GROUP_HEARTBEAT_INTERVAL": "0.3",
    "JOBS_LIB_STALE_AFTER": "3",
}


class Faults:
    """Does something to a service, and heals it."""

    def __init__(self, servers: Servers, services: dict[str, Service]) -> None:
        self._servers = servers
        self._services = services

    def list_turns(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each fault with a line that says what happens."""
        for name in ("profiles", "relations"):
            service = self._services[name]
            yield (
                f"{name} and its API are killed, and come back after {AWAY:g} s",
                partial(self.kill, service),
            )
            yield (
                f"{name} stands still for {AWAY:g} s, and its API answers",
                partial(self.lag, service),
            )
            yield (
                f"{name} loses its database, and reads the topic from the start",
                partial(self.reset, service),
            )
            yield (
                f"a second process of {name} comes and goes",
                partial(self.rebalance, service),
            )
        detection = self._services["detection"]
        yield "detection is killed", partial(self.kill, detection)
        yield (
            "a second process of detection comes and goes",
            partial(self.rebalance, detection),
        )

    def kill(self, service: Service) -> None:
        """Kill all processes of a service, and start them again."""
        service.kill()
        time.sleep(AWAY)
        service.start()

    def lag(self, service: Service) -> None:
        """Stop the process that handles records: the API has old data meanwhile."""
        service.pause()
        time.sleep(AWAY)
        service.resume()

    def reset(self, service: Service) -> None:
        """Take a service its data, and set its groups back to the start.

        The groups come first. Once those who wait for them have asked again, nobody
        asks the API for what is gone.
        """
        service.kill()
        for group in GROUPS[service.name]:
            self._servers.set_back(group)
        time.sleep(3 * REFRESH)  # older answers count no more
        self._servers.make_database(service.name)
        service.start()

    def rebalance(self, service: Service) -> None:
        """Let a second process take partitions, and give them back."""
        other = service.start_worker()
        deadline = time.monotonic() + DEADLINE
        while self._count_owners(service) < 2:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"a second process of {service.name} has no partition after "
                    f"{DEADLINE:g} s: give it more time, or look at what it has written"
                )
            time.sleep(0.1)
        service.stop(other)

    def _count_owners(self, service: Service) -> int:
        ((owners,),) = self._servers.read(
            service.name,
            "select count(distinct owner) from jobs_lib.origins"
            " where role like 'consume:%'",
        )
        return int(owners)
