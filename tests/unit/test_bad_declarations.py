"""Declarations that cannot be meant are refused where they stand, in one line."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from jobs_lib import App, Job
from jobs_lib.app import load_app
from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


class Odd:
    """It has no JSON form."""


def work(job: Job, region: int) -> None: ...


def handle(record, conn) -> None: ...


def load(conn, keys) -> dict[str, Any]:
    return {}


def tick(app: App, **more: Any) -> object:
    return app.periodic("* * * * *", **more)(app.job()(work))


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "settle, a text": (lambda app: app.topic("t", settle="x"), "settle .*'x'"),
    "settle, negative": (
        lambda app: app.topic("t", settle=-1, compacted=True), "settle .*-1",
    ),
    "settle, no number": (
        lambda app: app.topic("t", settle=float("nan"), merge=True), "settle .*nan",
    ),
    "settle, a span": (
        lambda app: app.topic("t", settle=timedelta(seconds=2), merge=True), "settle",
    ),
    "entities": (lambda app: app.topic("t", entities="many"), "'t' are 'many'"),
    "entities of a stream": (lambda app: app.stream("t", entities=-4), "'t' are -4"),
    "config": (lambda app: app.topic("t", config=["x"]), r"config .* is \['x'\]"),
    "compacted": (lambda app: app.topic("t", compacted="no"), "'no': give True or"),
    "a consumer's value": (
        lambda app: app.consumer("t", group="g", value=Odd)(handle),
        "'t' have no JSON form: .*Odd",
    ),
    "a read model's value": (
        lambda app: app.read_model("t", group="g", table="x", key="k", value=Odd),
        "'t' have no JSON form",
    ),
    "a transactional's value": (
        lambda app: app.transactional("t", group="g", value=Odd), "have no JSON form",
    ),
    "a name without a type": (
        lambda app: app.topic("t", value="Nope"), "'t' have no JSON form: .*Nope",
    ),
    "debounce": (
        lambda app: app.job(group="region", last_only=True, debounce=1e9)(work),
        "debounce.* at most 31,622,400",
    ),
    "max_wait": (
        lambda app: app.job(
            group="region", last_only=True, debounce=1, max_wait=sys.maxsize
        )(work),
        "max_wait.* at most 31,622,400",
    ),
    "a secret": (
        lambda app: app.topic("t", value=list[SecretStr]), "values .* 't' .*asterisks",
    ),
    "a stream's secret": (
        lambda app: app.stream("t", value=SecretStr), "values .* 't' .*asterisks",
    ),
    "internal": (lambda app: app.stream("t", internal=None), "internal=None"),
    "internal numbers": (lambda app: app.stream("t", internal=[1]), r"internal=\[1\]"),
    "acks": (lambda app: app.stream("t", acks=[1]), r"acks=\[1\]"),
    "a consumer's type": (
        lambda app: app.consumer("t", group="g", type=5)(handle), "type of .* is 5",
    ),
    "last_only": (
        lambda app: app.job(group="region", last_only="x")(work), "last_only .* 'x'",
    ),
    "tz": (lambda app: tick(app, tz=None, payload={"region": 1}), "time zone None"),
    "payload": (lambda app: tick(app, payload=[1]), r"payload .* is \[1\]"),
    "source": (
        lambda app: app.entity(app.topic("t"), source=None, key="a")(load),
        "source of .* is None",
    ),
    "an entity's name": (
        lambda app: app.entity(app.topic("t"), source="a", key="a", name=5)(load),
        "name of .* is 5",
    ),
    "settings": (lambda app: type(app)("x", settings="postgresql://"), "are a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.guarantee("U4")
def test_it_is_refused_with_the_value(name):
    declare, told = WRONG[name]
    with pytest.raises(ConfigurationError, match=told):
        declare(App("shop"))


@pytest.mark.parametrize("path", [".shop:app", "..:app", ":app", "shop:", "shop"])
def test_a_path_that_names_no_app_is_refused(path):
    with pytest.raises(ConfigurationError, match="write module:attribute"):
        load_app(path)
