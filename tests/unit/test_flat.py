"""Objects that pydantic writes without a word, and all others."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    RootModel,
    TypeAdapter,
    computed_field,
    field_serializer,
    model_serializer,
)
from pydantic_core import PydanticSerializationError

from jobs_lib.schemas.flat import make_chooser


class Color(Enum):
    RED = "red"


class Text(str):
    """A text of another class."""

    __slots__ = ()


@dataclass
class Tenant:
    id: str
    seats: int | None = None
    rate: float = 0.0


class Model(BaseModel):
    id: str
    seats: int | None = None
    color: Color = Color.RED
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Slotted:
    id: str


@dataclass
class Deep:
    tenant: Tenant


class Listing(BaseModel):
    ids: list[str] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str = "1"


class Root(RootModel[str]):
    pass


class Counted(BaseModel):
    id: str = "1"

    @computed_field
    def size(self) -> int:
        return "many"  # type: ignore[return-value]


class Shown(BaseModel):
    id: str = "1"

    @field_serializer("id")
    def show(self, value: str) -> int:
        return value  # type: ignore[return-value]


class Whole(BaseModel):
    id: str = "1"

    @model_serializer
    def show(self) -> str:
        return 1  # type: ignore[return-value]


class Ours(BaseModel):
    id: Annotated[str, PlainSerializer(lambda value: value, return_type=int)] = "1"


def choose(type_: Any, value: Any) -> object:
    return make_chooser(TypeAdapter(type_).core_schema)(value)


@pytest.mark.parametrize(
    "value",
    [
        Tenant("1"),
        Tenant("1", 2, 0.5),
        Model(id="1"),
        Model(id="1", seats=3, color=Color.RED),
    ],
    ids=repr,
)
def test_an_object_with_plain_fields_is_flat(value):
    assert choose(type(value), value) is False


@pytest.mark.parametrize("type_", [Any, dict[str, Any]], ids=str)
def test_a_dict_of_plain_values_is_flat_where_any_are_allowed(type_):
    assert choose(type_, {}) is False
    assert choose(type_, {"id": "1", "seats": 2, "at": date(2026, 1, 1)}) is False
    for value in (Text("1"), Tenant("1"), {"id": "1"}, ["1"], Color.RED):
        assert choose(type_, {"id": value}) == "error"


def test_an_object_with_other_fields_than_its_class_is_not_flat():
    late, short = Tenant("1"), Tenant("1")
    late.more = 1  # type: ignore[attr-defined]
    del short.rate
    assert choose(Tenant, late) == choose(Tenant, short) == "error"


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Tenant, Tenant(1)),  # type: ignore[arg-type]
        (Tenant, Tenant(Text("1"))),
        (Tenant, Tenant("1", True)),
        (Tenant, Deep(Tenant("1"))),
        (Model, Model.model_construct(id=None)),  # type: ignore[arg-type]
        (Slotted, Slotted("1")),
        (Deep, Deep(Tenant("1"))),
        (Listing, Listing()),
        (Open, Open()),
        (Root, Root("1")),
        (Counted, Counted()),
        (Shown, Shown()),
        (Whole, Whole()),
        (Ours, Ours()),
        (dict[str, str], {"id": "1"}),
        (Any, Tenant("1")),
        (Any, OrderedDict(id="1")),
        (dict[str, Annotated[Any, PlainSerializer(str)]], {"id": "1"}),
        (dict[int, Any], {1: "1"}),
        (str, "1"),
    ],
    ids=lambda given: given.__name__ if type(given) is type else "",
)
def test_pydantic_is_asked_about_all_others(type_, value):
    assert choose(type_, value) == "error"


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.decimals(),
    st.uuids(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.sampled_from(Color),
    st.builds(Tenant, st.text()),
    st.lists(st.text()),
)
TYPES = [
    str,
    int,
    float,
    bool,
    type(None),
    UUID,
    Decimal,
    datetime,
    date,
    time,
    timedelta,
    Color,
]
FIELDS = st.lists(
    st.tuples(st.sampled_from(TYPES), st.booleans()), min_size=1, max_size=3
)


@given(FIELDS, st.data())
def test_pydantic_says_nothing_of_a_flat_object(fields, data):
    names = [f"f{number}" for number in range(len(fields))]
    types = [one | None if may_lack else one for one, may_lack in fields]
    cls = dataclasses.make_dataclass("Some", list(zip(names, types, strict=True)))
    # Half of the values are of the declared types.
    value = cls(*[data.draw(st.one_of(VALUES, st.from_type(type_))) for type_ in types])
    adapter: TypeAdapter[Any] = TypeAdapter(cls)
    if make_chooser(adapter.core_schema)(value) is False:
        adapter.dump_python(value, warnings="error")
        try:
            adapter.dump_json(value, warnings="error")
        except PydanticSerializationError as error:
            # Such as a text that UTF-8 cannot express: it fails anyway.
            with pytest.raises(type(error)):
                adapter.dump_json(value, warnings=False)


@given(st.dictionaries(st.text(), VALUES))
def test_pydantic_says_nothing_of_a_flat_dict(value):
    adapter: TypeAdapter[Any] = TypeAdapter(Any)
    if make_chooser(adapter.core_schema)(value) is False:
        adapter.dump_python(value, warnings="error")
