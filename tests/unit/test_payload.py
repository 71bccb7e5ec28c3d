"""A handler's signature is the schema of its payload; no database is needed."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, PlainSerializer, Secret, SecretBytes, SecretStr

from jobs_lib.errors import ConfigurationError, PayloadError, StoredPayloadError
from jobs_lib.jobs.payload import Payload

LIMIT = 1_000


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    article: str
    price: Decimal
    tags: list[str] = field(default_factory=list)


@dataclass
class Order:
    id: UUID
    placed: datetime
    lines: list[Line]


class Unknown:
    """A class without a form in JSON."""

    def __repr__(self) -> str:
        return "Unknown()"


def payload(function):
    return Payload("shop.ship", function, globals())


def round_trip(function, **values):
    schema = payload(function)
    return schema.decode(schema.encode(values, LIMIT).decode())


def take(value_type):
    """Make a handler with one parameter of this type."""

    def handler(job, value): ...

    handler.__annotations__ = {"value": value_type}
    return handler


ORDER = Order(
    UUID("6f2b1c9e-0000-4000-8000-000000000001"),
    datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC),
    [Line("tea", Decimal("1.10"), ["hot", "süß ✈"]), Line("cup", Decimal("0"))],
)


@pytest.mark.guarantee("J4")
@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (str, 'süß ✈ \\u0000 " \\ \n'),
        (int, 2**70),
        (int, -1),
        (float, 0.1),
        (bool, True),
        (bytes, b"\x00\xff"),
        (Decimal, Decimal("1.10")),
        (Decimal, Decimal("123456789012345678901234567890.123456789")),
        (UUID, ORDER.id),
        (date, date(2024, 2, 29)),
        (datetime, ORDER.placed),
        (
            datetime,
            datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
        ),
        (timedelta, timedelta(days=1, microseconds=1)),
        (Colour, Colour.BLUE),
        (Literal["a", "b"], "b"),
        (int | None, None),
        (int | None, 5),
        (int | str, "5"),
        (list[list[int]], [[1], [], [2, 3]]),
        (dict[str, list[Decimal]], {"a": [Decimal("0.10")], "": []}),
        (tuple[int, str], (1, "a")),
        (set[int], {1, 2, 3}),
        (Order, ORDER),
        (list[Order], [ORDER, ORDER]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_come_back_equal_and_of_their_types(value_type, value):
    result = round_trip(take(value_type), value=value)["value"]
    assert result == value
    assert type(result) is type(value)


def test_decimals_keep_their_digits():
    result = round_trip(take(Decimal), value=Decimal("1.10"))["value"]
    assert str(result) == "1.10"


def test_a_payload_may_be_empty():
    def handler(job): ...

    assert payload(handler).encode({}, LIMIT) == b"{}"
    assert round_trip(handler) == {}


def test_a_parameter_of_any_type_takes_any_json():
    def handler(job, anything: Any): ...

    value = {"a": [1, None, True, "x"]}
    assert round_trip(handler, anything=value) == {"anything": value}


def test_arguments_are_bound_by_place_and_by_name():
    def handler(job, a: int, b: int = 2, *, c: int = 3): ...

    assert payload(handler).bind((1,), {"c": 4}) == {"a": 1, "c": 4}


def test_arguments_that_do_not_fit_the_signature_are_refused():
    def handler(job, a: int): ...

    with pytest.raises(PayloadError, match=r"shop\.ship.*\(a: 'int'\)|too many"):
        payload(handler).bind((1, 2), {})


def test_defaults_are_not_stored_but_filled_in_when_the_job_runs():
    def handler(job, a: int, b: int = 2): ...

    schema = payload(handler)
    assert json.loads(schema.encode({"a": 1}, LIMIT)) == {"a": 1}
    assert schema.fill(schema.decode('{"a": 1}')) == {"a": 1, "b": 2}
    assert schema.fill({"a": 1, "b": 5}) == {"a": 1, "b": 5}


def test_a_stored_payload_of_an_older_signature_gets_the_default():
    def before(job, order: int): ...

    def after(job, order: int, express: bool = False): ...

    stored = payload(before).encode({"order": 7}, LIMIT).decode()
    schema = payload(after)
    assert schema.fill(schema.decode(stored)) == {"order": 7, "express": False}


def test_a_stored_payload_that_does_not_fit_any_more_is_an_error():
    def handler(job, order: int): ...

    with pytest.raises(StoredPayloadError, match=r"stored payload.*order.*required"):
        payload(handler).decode('{"number": 7}')


@pytest.mark.guarantee("J4")
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "order: field required"),
        ({"order": 1, "extra": 2}, "extra: extra"),
        ({"order": "1"}, "order: input should be a valid integer"),
        ({"order": True}, "order: input should be a valid integer"),
        ({"order": None}, "order: input should be a valid integer"),
        ({"order": 1.0}, "order: input should be a valid integer"),
    ],
)
def test_a_field_that_is_missing_unknown_or_of_a_wrong_type_is_refused(values, told):
    def handler(job, order: int): ...

    with pytest.raises(PayloadError) as caught:
        payload(handler).encode(values, LIMIT)
    assert told in str(caught.value)
    assert "shop.ship(order: int)" in str(caught.value)


def test_a_wrong_field_deep_inside_is_named_by_its_path():
    wrong = Order(ORDER.id, ORDER.placed, [Line("tea", 1.5)])  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match=r"value\.lines\.0\.price"):
        payload(take(Order)).encode({"value": wrong}, LIMIT)


def test_the_refused_value_is_not_shown():
    with pytest.raises(PayloadError) as caught:
        payload(take(int)).encode({"value": "hunter2canary"}, LIMIT)
    assert "hunter2canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (float, math.nan),
        (float, math.inf),
        (Decimal, Decimal("NaN")),
        (Decimal, Decimal("Infinity")),
        (Any, math.nan),
        (Any, {"deep": [-math.inf]}),
        (Any, Unknown()),
        (Any, {"a": Unknown()}),
        (set[Any], {Unknown()}),
    ],
    ids=repr,
)
def test_a_value_that_has_no_json_form_is_refused(value_type, value):
    with pytest.raises(PayloadError, match=r"shop\.ship"):
        payload(take(value_type)).encode({"value": value}, LIMIT)


@pytest.mark.parametrize(
    "value", ["\0", "a\0b", "\\\0", "\\\\\0", ["x", {"\0": 1}]], ids=repr
)
def test_a_nul_character_is_refused(value):
    with pytest.raises(PayloadError, match="NUL character"):
        payload(take(Any)).encode({"value": value}, LIMIT)


@pytest.mark.parametrize("value", [r"\u0000", r"\\u0000", "u0000", "\\"], ids=repr)
def test_text_that_only_looks_like_a_nul_is_kept(value):
    assert round_trip(take(str), value=value) == {"value": value}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_text_that_only_looks_like_a_number_is_kept(value):
    assert round_trip(take(str), value=value) == {"value": value}


@pytest.mark.parametrize("value_type", [str, Any])
@pytest.mark.parametrize("value", ["\ud800", "a\udfffb"], ids=ascii)
def test_a_lone_surrogate_is_refused(value_type, value):
    with pytest.raises(PayloadError, match=r"shop\.ship"):
        payload(take(value_type)).encode({"value": value}, LIMIT)


def test_a_payload_over_the_limit_is_refused_with_the_limit():
    def handler(job, text: str): ...

    schema = payload(handler)
    fits = "x" * (LIMIT - len('{"text":""}'))
    assert len(schema.encode({"text": fits}, LIMIT)) == LIMIT
    with pytest.raises(PayloadError, match=rf"{LIMIT + 1} bytes, the limit is {LIMIT}"):
        schema.encode({"text": fits + "x"}, LIMIT)


def test_the_limit_counts_bytes_and_not_characters():
    with pytest.raises(PayloadError, match="bytes"):
        payload(take(str)).encode({"value": "✈" * (LIMIT // 2)}, LIMIT)


def test_a_handler_without_names_for_its_fields_is_refused():
    def places(job, *args: int): ...

    def names(job, **kwargs: int): ...

    for handler in (places, names):
        with pytest.raises(ConfigurationError, match="named fields only"):
            payload(handler)


def test_a_parameter_of_a_type_without_json_form_is_refused():
    with pytest.raises(ConfigurationError, match=r"shop\.ship.*no JSON form"):
        payload(take(Unknown))


class Login(BaseModel):
    user: str
    token: SecretStr


class Account(BaseModel):
    logins: list[Login]


def show(secret: SecretStr) -> str:
    return secret.get_secret_value()


@pytest.mark.parametrize(
    ("type_", "place"),
    [
        (SecretStr, "value"),
        (SecretBytes | None, "value"),
        (Secret[int], "value"),
        (dict[str, list[SecretStr]], "value"),
        (Account, r"value\.logins\.token"),
    ],
)
def test_a_secret_of_pydantic_is_refused_since_it_would_be_written_as_asterisks(
    type_, place
):
    with pytest.raises(ConfigurationError, match=f"parameter {place} of .*asterisks"):
        payload(take(type_))


def test_a_secret_with_a_serializer_comes_back():
    shown = Annotated[SecretStr, PlainSerializer(show)]
    got = round_trip(take(shown), value=SecretStr("plum-tree"))["value"]
    assert got.get_secret_value() == "plum-tree"


def test_an_annotation_that_cannot_be_resolved_is_refused():
    def handler(job, order: Missing): ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(ConfigurationError, match=r"Missing.*above the handler"):
        payload(handler)


@pytest.mark.parametrize("name", ["class_", "items", "keys", "type", "model_config"])
def test_a_field_may_have_any_name(name):
    namespace: dict[str, Any] = {}
    exec(f"def handler(job, {name}: int): ...", namespace)
    assert round_trip(namespace["handler"], **{name: 1}) == {name: 1}
