"""A mistake in the declaration of a stream is refused, with a way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, Field

from jobs_lib import App, ConfigurationError, PayloadError
from jobs_lib.settings import load_settings


@dataclass
class Tenant:
    """The state of a tenant."""

    id: str
    email: str


class Account(BaseModel):
    """A state with a field that has another name in JSON."""

    secret: str = Field(alias="passwordHash")


class Sub(BaseModel):
    """A state that holds another one."""

    tenant: Tenant


async def check_later(key: str, value: Any, conn: Any) -> None: ...


def check_key(key: str) -> None: ...


@pytest.fixture
def app() -> App:
    return App("shop", settings=load_settings())


@pytest.mark.guarantee("U4", "T6")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"acks": 2}, "acks=2: give 0, 1 or 'all'"),
        ({"acks": True}, "acks=True"),
        ({"acks": "1"}, "acks='1'"),
        ({"internal": "email"}, "give a set of names"),
        ({"value": Tenant, "internal": {"e-mail"}}, "no field 'e-mail': they have em"),
        ({"value": Tenant, "key": "name"}, "no field 'name'"),
        ({"value": Account, "internal": {"secret"}}, "they have passwordHash"),
        ({"value": Sub, "internal": {"email"}}, "no field 'email': they have tenant"),
        ({"check": check_later}, "the check of 'tenants' is async"),
        ({"check": check_key}, r"def check_key\(key, value, conn\)"),
        ({"current": check_later}, "is async"),
        ({"partitions": 0}, "are 0: give how many"),
        ({"config": {"max.message.bytes": "2k"}}, "give a number of bytes"),
        ({"config": {"delete.retention.ms": "1"}}, "would keep tombstones"),
    ],
)
def test_a_wrong_declaration_is_refused(app, given, says):
    with pytest.raises(ConfigurationError, match=says):
        app.stream("tenants", **given)
    assert app.streams == {}


@pytest.mark.guarantee("U4")
def test_a_topic_has_the_outbox_or_a_stream_and_not_both(app):
    app.topic("states")
    app.stream("tenants")
    for declare, name in [
        (app.stream, "states"),
        (app.stream, "tenants"),
        (app.topic, "tenants"),
    ]:
        with pytest.raises(ConfigurationError, match=f"'{name}' is declared twice"):
            declare(name)


@pytest.mark.guarantee("T13")
def test_a_value_whose_internal_fields_cannot_be_left_out_is_refused(app):
    stream = app.stream("tenants", internal={"hash"})
    with pytest.raises(PayloadError, match="of type list, and `key` and `internal`"):
        stream.publish("t1", ["hash"])


def test_an_environment_names_its_streams():
    settings = load_settings(environment="dev")
    app = App("shop", settings=settings)
    assert app.stream("tenants").name == "dev.tenants"
    assert app.names_in_kafka() == {"dev.tenants"}
