"""The users that the secured broker knows, and their passwords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.secured import SecuredBroker

CANARY = "hunter2-canary"
"""A password that must not appear anywhere."""
PASSWORDS = {"alice": "alice-" + CANARY, "bob": "bob-" + CANARY}


@dataclass(frozen=True)
class User:
    """A user that the secured broker knows by SASL/PLAIN."""

    name: str

    def kafka(self, broker: SecuredBroker) -> dict[str, str]:
        """The settings with which the broker accepts them."""
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(broker.authority),
            "sasl.mechanism": "PLAIN",
            "sasl.username": self.name,
            "sasl.password": PASSWORDS[self.name],
        }
