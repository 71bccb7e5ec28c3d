"""A broker that asks clients who they are: TLS, passwords and rights, on sockets.

Its plaintext listener stays, for the test's own admin. Each other listener has another
certificate, so that tests can meet every way to distrust a broker.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOST = "127.0.0.1"
SECURED, EXPIRED, ELSEWHERE = "SECURED", "EXPIRED", "ELSEWHERE"
"""The listeners. Their certificates: valid, of last year, and of another host."""
_LISTENERS = (SECURED, EXPIRED, ELSEWHERE)
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


class SecuredBroker(KafkaBroker):
    """A broker for tests with listeners that speak SASL over TLS.

    Args:
        passwords: those of the users that SASL/PLAIN knows. Passwords of SCRAM-SHA-256
            are set while the broker runs, which asks for them again every 3 seconds.
        certificates: a folder of the test.
    """

    def __init__(self, passwords: Mapping[str, str], certificates: Path) -> None:
        self._ports: dict[str, int] = {}
        authority = trustme.CA()
        self.authority = certificates / "authority.pem"
        authority.cert_pem.write_to_path(self.authority)
        self.stranger = certificates / "stranger.pem"
        """The certificate of an authority that has signed nothing here."""
        trustme.CA().cert_pem.write_to_path(self.stranger)
        last_year = datetime.now(UTC) - timedelta(days=365)
        issued = {
            SECURED: authority.issue_cert(HOST),
            EXPIRED: authority.issue_cert(HOST, not_after=last_year),
            ELSEWHERE: authority.issue_cert("kafka.example"),
        }
        users = " ".join(f'user_{name}="{word}"' for name, word in passwords.items())
        properties = {
            "authorizer.class.name": _AUTHORIZER,
            # The anonymous user is the admin of the tests, and the broker itself.
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        }
        for name, certificate in issued.items():
            file = certificates / f"{name}.pem"
            file.write_bytes(_key_store(certificate))
            prefix = f"listener.name.{name.lower()}"
            properties |= {
                f"{prefix}.ssl.keystore.type": "PEM",
                f"{prefix}.ssl.keystore.location": str(file),
                f"{prefix}.plain.sasl.jaas.config": f"{_PLAIN} required {users};",
                f"{prefix}.scram-sha-256.sasl.jaas.config": f"{_SCRAM} required;",
                f"{prefix}.scram-sha-256.connections.max.reauth.ms": "3000",
            }
        super().__init__(properties=properties)

    def address_of(self, listener: str) -> str:
        """The addresses for clients of a listener, as ``bootstrap.servers``."""
        return f"{HOST}:{self._ports[listener]}"

    def _settings(self, port: int) -> str:
        """The settings of every broker, and the other listeners."""
        self._ports = self._ports or {name: free_port() for name in _LISTENERS}
        added = {name: f"{name}://{self.address_of(name)}" for name in _LISTENERS}
        lines = super()._settings(port).splitlines()
        protocols = [f"{name}:SASL_SSL" for name in _LISTENERS]
        more = {
            "listeners": added.values(),
            "advertised.listeners": added.values(),
            "listener.security.protocol.map": protocols,
        }
        for n, line in enumerate(lines):
            name = line.partition("=")[0]
            lines[n] = ",".join([line, *more.get(name, [])])
        return "\n".join(lines) + "\n"


def _key_store(certificate: trustme.LeafCert) -> bytes:
    """The key and the chain, in the only form that Kafka reads."""
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pkcs8 + b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
