"""A Kafka that asks clients who they are, and a PostgreSQL role with a password."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from psycopg.conninfo import conninfo_to_dict

from tests import support
from tests.security.helpers import CANARY, PASSWORDS, User
from tests.support.apps import make_app
from tests.support.secured import SECURED, SecuredBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import App


@pytest.fixture(scope="session")
def secured(tmp_path_factory) -> Iterator[SecuredBroker]:
    """A broker of this run with SASL, TLS and access rights."""
    folder = tmp_path_factory.mktemp("certificates")
    with SecuredBroker(PASSWORDS, folder) as broker:
        yield broker


@pytest.fixture(scope="session")
def secured_admin(secured) -> AdminClient:
    """An admin client with all rights, on the listener in plain text."""
    return AdminClient({"bootstrap.servers": secured.bootstrap_servers})


@pytest.fixture
def secured_topic(secured_admin) -> Iterator[Callable[[], str]]:
    """A function that creates a topic for this test alone and returns its name."""
    made: list[str] = []

    def create() -> str:
        made.append(f"secured-{uuid.uuid4().hex[:12]}")
        support.create_topic(secured_admin, made[-1], 1, None)
        return made[-1]

    yield create
    support.delete_topics(secured_admin, made)


@pytest.fixture
def grant(secured_admin, wait_for) -> Iterator[Callable[..., None]]:
    """`grant(user, kind, name, right, prefixed=False)`: rights end with the test."""
    given: set[AclBindingFilter] = set()

    def grant(
        user: str, kind: str, name: str, right: str, *, prefixed: bool = False
    ) -> None:
        place = place_right(user, kind, name, right, prefixed=prefixed)
        given.add(AclBindingFilter(*place))
        for future in secured_admin.create_acls([AclBinding(*place)]).values():
            future.result()
        wait_for(
            lambda: secured_admin.describe_acls(AclBindingFilter(*place)).result(),
            what=f"{user} may {right} {name}",
        )

    yield grant
    for future in secured_admin.delete_acls([*given]).values() if given else ():
        future.result()


@pytest.fixture
def revoke(secured_admin, wait_for) -> Callable[..., None]:
    """`revoke(user, kind, name, right)` takes a granted right back."""

    def revoke(user: str, kind: str, name: str, right: str) -> None:
        wanted = AclBindingFilter(*place_right(user, kind, name, right))
        for future in secured_admin.delete_acls([wanted]).values():
            assert future.result(), f"{user} had no right to {right} {name}"
        wait_for(
            lambda: not secured_admin.describe_acls(wanted).result(),
            what=f"{user} may not {right} {name}",
        )

    return revoke


def place_right(
    user: str, kind: str, name: str, right: str, *, prefixed: bool = False
) -> tuple[Any, ...]:
    """Return an ACL, and the filter that finds it."""
    return (
        ResourceType[kind],
        name,
        ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[right],
        AclPermissionType.ALLOW,
    )


@pytest.fixture
def set_scram_password(secured_admin) -> Callable[[str, str], None]:
    """A function that sets the password of a SCRAM user while the broker runs."""

    def change(user: str, password: str) -> None:
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        told = UserScramCredentialUpsertion(user, info, password.encode())
        for future in secured_admin.alter_user_scram_credentials([told]).values():
            future.result()

    return change


@pytest.fixture
def secured_app(database_url, secured) -> Callable[..., App]:
    """`secured_app(kafka, listener=…, **settings)` makes an app, by default alice's."""

    def make(
        kafka: dict[str, str] | None = None, listener: str = SECURED, **settings: Any
    ) -> App:
        given = User("alice").kafka(secured) | (kafka or {})
        return make_app(
            database_url,
            kafka_bootstrap_servers=secured.address_of(listener),
            kafka={key: value for key, value in given.items() if value},
            **settings,
        )

    return make


@pytest.fixture
def secret_url(postgres_server, database_url, admin) -> str:
    """The URL of a role whose password is a canary; the server asks for it."""
    role = "keeper"
    with psycopg.connect(database_url, autocommit=True) as connection:
        if not connection.execute(
            "select from pg_roles where rolname = %s", (role,)
        ).rowcount:
            connection.execute(f"create role {role} superuser login")
            hba = postgres_server.data / "pg_hba.conf"
            rule = f"host all {role} all scram-sha-256\n"
            hba.write_text(rule + hba.read_text())
            connection.execute("select pg_reload_conf()")
        connection.execute(f"alter role {role} password '{CANARY}'")
    parts = conninfo_to_dict(database_url)
    return f"postgresql://{role}:{CANARY}@127.0.0.1:{parts['port']}/{parts['dbname']}"
