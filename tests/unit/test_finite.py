"""NaN and infinity never become null: the error names their place."""

from __future__ import annotations

import enum
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import pydantic.dataclasses
import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    SerializationInfo,
    SerializeAsAny,
    TypeAdapter,
    computed_field,
    field_serializer,
    model_serializer,
)
from pydantic_core import PydanticSerializationError
from typing_extensions import TypedDict

from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.jobs.payload import Payload
from jobs_lib.schemas import finite
from jobs_lib.schemas.codec import JsonCodec, make_encoder

T = TypeVar("T")


class Height(BaseModel):
    metres: float


class Speed(Height):
    knots: float = 1.0


class Perhaps(BaseModel):
    metres: float | None = None


class Tree(BaseModel):
    metres: float
    below: list[Tree] = []


class Box(BaseModel, Generic[T]):
    held: T


class Anything(BaseModel):
    held: Any


class Bare(BaseModel):
    held: list  # type: ignore[type-arg]


class More(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]


class AsItself(BaseModel):
    held: SerializeAsAny[Height]


class Renamed(BaseModel):
    metres: float = Field(serialization_alias="m", validation_alias="m")


class Written(BaseModel):
    metres: int

    @field_serializer("metres")
    def write(self, metres: int) -> float:
        return math.nan


class Computed(BaseModel):
    metres: int

    @computed_field
    def feet(self) -> float:
        return math.nan


class ByName(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    metres: float


class AsString(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    metres: float


@dataclass
class Plain:
    metres: float


@pydantic.dataclasses.dataclass
class Checked:
    metres: float


class OfPlain(BaseModel):
    held: Plain


class Typed(TypedDict):
    metres: float


class Named(NamedTuple):
    metres: float


class Parts(BaseModel):
    typed: Typed = {"metres": 1.0}
    named: Named = Named(1.0)
    several: set[float] = set()
    by_name: dict[str, tuple[float, ...]] = {}


class Queue(BaseModel):
    held: deque[float]


@dataclass
class PlainQueue:
    held: deque[float]


class BareQueue(BaseModel):
    held: deque  # type: ignore[type-arg]


class Grade(enum.Enum):
    NONE = math.nan
    BEST = 1.0


class Level(float, enum.Enum):
    NONE = math.inf


class Pair(enum.Enum):
    NONE = (1.0, math.nan)


class Graded(BaseModel):
    grade: Grade | None


class Shifting(BaseModel):
    """Its JSON has another shape than its Python value."""

    held: list[Any]

    @model_serializer
    def write(self, info: SerializationInfo) -> Any:
        return {"a": self.held if info.mode == "python" else {"b": self.held}}


class Stream(BaseModel):
    held: Iterable[Height]


NAN, INF = math.nan, math.inf


def takes_deques() -> bool:
    """Tell whether this release of pydantic can write deques."""
    try:
        TypeAdapter(Any).dump_json(deque([1]))
    except PydanticSerializationError:
        return False
    return True


TAKES_DEQUES = takes_deques()
REFUSED = [
    (Height, Height(metres=NAN), "metres is NaN"),
    (Height, {"metres": -INF}, "metres is -Infinity"),
    (Height, Speed(metres=NAN), "metres is NaN"),
    (Height | None, Height(metres=INF), "metres is Infinity"),
    (Height | int, Height(metres=NAN), "metres is NaN"),
    (list[Height], [Height(metres=1), Height(metres=NAN)], "1.metres is NaN"),
    (dict[str, Height], {"canary": Height(metres=NAN)}, "*.metres is NaN"),
    (Perhaps, Perhaps(metres=NAN), "metres is NaN"),
    (Tree, Tree(metres=1, below=[Tree(metres=NAN)]), "below.0.metres is NaN"),
    (Box[float], Box[float](held=NAN), "held is NaN"),
    (Box[Height], Box[Height](held=Height(metres=NAN)), "held.metres is NaN"),
    (Anything, Anything(held={"canary": [NAN]}), "held.*.0 is NaN"),
    (Anything, Anything(held=Height(metres=NAN)), "held.* is NaN"),
    (Bare, Bare(held=[Height(metres=NAN)]), "held.0.* is NaN"),
    (More, More(canary=NAN), "* is NaN"),
    (AsItself, AsItself(held=Speed(metres=1, knots=NAN)), "held.* is NaN"),
    (SerializeAsAny[Height], Speed(metres=1, knots=NAN), "* is NaN"),
    (Renamed, Renamed(m=NAN), "m is NaN"),
    (Written, Written(metres=1), "metres is NaN"),
    (Computed, Computed(metres=1), "feet is NaN"),
    (ByName, ByName(metres=NAN), "metres is NaN"),
    (RootModel[list[float]], RootModel[list[float]]([1, NAN]), "1 is NaN"),
    (Checked, Checked(NAN), "metres is NaN"),
    (OfPlain, OfPlain(held=Plain(NAN)), "held.metres is NaN"),
    (Parts, Parts(typed={"metres": NAN}), "typed.metres is NaN"),
    (Parts, Parts(named=Named(NAN)), "named.0 is NaN"),
    (Parts, Parts(several={NAN}), "several.0 is NaN"),
    (Parts, Parts(by_name={"canary": (1, INF)}), "by_name.*.1 is Infinity"),
    (Queue, Queue(held=deque([1, NAN])), "held.1 is NaN"),
    (BareQueue, BareQueue(held=deque([Height(metres=NAN)])), "held.0.* is NaN"),
    (list[Level], [Level.NONE], "0 is Infinity"),
    (Pair | None, Pair.NONE, "1 is NaN"),
    (Graded, Graded(grade=Grade.NONE), "grade is NaN"),
    (Any, {"canary": [1, NAN]}, "*.1 is NaN"),
    (
        Annotated[int, PlainSerializer(lambda _: Height(metres=NAN), return_type=Any)],
        1,
        "* is NaN",
    ),
]
OF_RECORDS = [
    (deque[float], deque([1, NAN]), "1 is NaN"),
    (dict[str, deque[float]], {"canary": deque([INF])}, "*.0 is Infinity"),
    (Sequence[float], deque([NAN]), "0 is NaN"),
    (PlainQueue, PlainQueue(deque([NAN])), "held.0 is NaN"),
    (Grade, Grade.NONE, "it is NaN"),
    (Any, deque([1, NAN]), "1 is NaN"),
    (Any, {"canary": deque([Height(metres=NAN)])}, "*.0.* is NaN"),
    (Anything, Anything(held=deque([NAN])), "held.0 is NaN"),
    (Any, Grade.NONE, "it is NaN"),
    (Anything, Anything(held=[Grade.NONE]), "held.0 is NaN"),
    (Any, {"canary": (n for n in [1, NAN])}, "it holds an iterator"),
    (Any, map(float, ["nan"]), "it holds an iterator"),
    (Any, deque([iter([INF])]), "it holds an iterator"),
    (Anything, Anything(held=iter([NAN])), "it holds an iterator"),
    (Any, ["NaN", None, iter([NAN])], "it holds an iterator"),
    (Shifting, Shifting(held=[1, NAN]), "it holds NaN or infinity"),
]
"""Payloads refuse these values by their types, or by another check."""
KEPT = [
    (Perhaps, Perhaps(), '{"metres":null}'),
    (AsString, AsString(metres=INF), '{"metres":"Infinity"}'),
    (Box[str | None], Box[str | None](held="NaN"), '{"held":"NaN"}'),
    (Anything, Anything(held=["Infinity", None, 1.5]), None),
    (deque[str | float | None], deque(["NaN", None, 1.5]), '["NaN",null,1.5]'),
    (Graded, Graded(grade=None), '{"grade":null}'),
    (Grade, Grade.BEST, "1.0"),
    (Shifting, Shifting(held=["NaN", None]), '{"a":{"b":["NaN",null]}}'),
    (
        Annotated[float, PlainSerializer(str, return_type=str)],
        1.5,
        '"1.5"',
    ),
]


def payload(value_type: Any) -> Payload:
    def handler(job, value): ...

    handler.__annotations__ = {"value": value_type}
    return Payload("shop.ship", handler, globals())


@pytest.fixture(params=[True, False], ids=["by name", "by looking"])
def named(request, monkeypatch):
    """Some releases of pydantic-core write a class by its own schema only."""
    if not request.param:
        monkeypatch.setattr(finite, "_can_name", lambda: False)


@pytest.mark.guarantee("FJ5")
@pytest.mark.parametrize(("value_type", "value", "told"), REFUSED)
def test_no_payload_holds_a_number_that_json_has_not(named, value_type, value, told):
    schema = payload(value_type)
    for encode in (
        lambda: schema.encode({"value": value}, 1_000),
        lambda: schema.encode_many([{"value": value}], 1_000),
    ):
        with pytest.raises(PayloadError) as caught:
            encode()
        place = "value." if told[0] != " " else "value"
        assert f"'shop.ship' cannot be enqueued: {place}{told}," in str(caught.value)
        assert "canary" not in str(caught.value)


def refusal(told: str, reason: str) -> str:
    """Return a codec's refusal; pydantic before 2.13 writes no deque at all."""
    text = f"^{re.escape(told)}, {reason}"
    return text if TAKES_DEQUES else f"{text}|^Unable to serialize .*deque"


@pytest.mark.parametrize(("value_type", "value", "told"), REFUSED)
def test_no_record_holds_a_number_that_json_has_not(value_type, value, told):
    codec = JsonCodec(TypeAdapter(value_type))
    with pytest.raises(ValueError, match=refusal(told, "which JSON has no form for")):
        codec.encode(value)


@pytest.mark.parametrize(("value_type", "value", "told"), OF_RECORDS)
def test_no_record_hides_a_number_that_json_has_not(value_type, value, told):
    codec = JsonCodec(TypeAdapter(value_type))
    with pytest.raises(ValueError, match=refusal(told, "w")) as caught:
        codec.encode(value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("value_type", "value", "text"),
    [
        *KEPT,
        (Any, {"a": iter([1.5, "NaN"])}, '{"a":[1.5,"NaN"]}'),
        pytest.param(
            *(Any, {"a": deque(["NaN", None])}, '{"a":["NaN",null]}'),
            marks=pytest.mark.skipif(not TAKES_DEQUES, reason="pydantic takes none"),
        ),
        (Any, {"a": b"\xc3\xa9", "b": (None, {1.5})}, None),
    ],
)
def test_a_value_that_only_looks_like_a_non_finite_number_is_sent(
    value_type, value, text
):
    encoded = JsonCodec(TypeAdapter(value_type)).encode(value)
    assert text is None or encoded.decode() == text


@pytest.mark.parametrize(
    "value_type",
    [Iterable[float], list[Iterable[str]], Stream, Box[Stream], Stream | None],
)
def test_no_topic_has_values_that_can_be_read_only_once(value_type):
    with pytest.raises(ConfigurationError, match="read once only: declare a list"):
        make_encoder("t", value_type, None, lambda: None, str)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("value_type", "value", "text"), KEPT)
def test_a_value_that_only_looks_like_a_non_finite_number_is_enqueued(
    named, value_type, value, text
):
    schema = payload(value_type)
    encoded = schema.encode({"value": value}, 1_000)
    assert schema.encode_many([{"value": value}], 1_000) == [encoded]
    assert text is None or encoded.decode() == f'{{"value":{text}}}'
    assert isinstance(json.loads(encoded), dict)


@pytest.mark.parametrize(
    "value_type",
    [str, int | None, float, Any, dict[str, float], Plain, Typed, Box[str | None]],
)
def test_a_null_costs_nothing_where_no_number_can_become_one(monkeypatch, value_type):
    def look(*args: object) -> None:
        raise AssertionError("a value was looked through")

    schema = payload(value_type | None)
    monkeypatch.setattr("jobs_lib.jobs.payload.check_finite", look)
    assert schema.encode({"value": None}, 1_000) == b'{"value":null}'


def test_a_null_beside_a_number_costs_nothing_where_pydantic_can_name_it(monkeypatch):
    if not finite._can_name():
        pytest.skip("this pydantic-core writes a class by its own schema only")
    test_a_null_costs_nothing_where_no_number_can_become_one(monkeypatch, Perhaps)


def test_a_serializer_that_writes_json_only_shows_no_value():
    def write(value: str, info: SerializationInfo) -> Any:
        if info.mode != "json":
            raise ValueError(value)

    schema = payload(Annotated[str, PlainSerializer(write)])
    with pytest.raises(PayloadError) as caught:
        schema.encode({"value": "canary"}, 1_000)
    assert "calling function `write`" in str(caught.value)
    assert "canary" not in str(caught.value)
