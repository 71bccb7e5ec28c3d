"""What the function of a read model returns: rows, or something that is refused."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib import RecordError
from jobs_lib.consuming.subscription import BlockError
from tests.support.apps import make_app

TABLES = {"order_rm": "id", "line_rm": "order_id"}
DECLARED: dict[str, dict[str, Any]] = {
    "tables": {"tables": TABLES},
    "side": {"table": "line_rm", "key": "order_id", "versions": "side"},
    "row": {"table": "order_rm", "key": "id"},
}


def read(made: Any, **declared: Any) -> list[Any]:
    """Read a record of which a function makes that; returns the rows."""
    app = make_app("")
    app.read_model("orders", group="g", **declared)(lambda record: made)
    message = Mock()
    message.key.return_value, message.value.return_value = b"k", b"{}"
    message.headers.return_value = []
    message.timestamp.return_value = (1, 0)
    model = app.consumers[0].model
    assert model is not None
    return [row for wave in model.read([message]).waves for _, _, row, _, _ in wave]


@pytest.mark.parametrize(
    "lines",
    [
        None,
        {"a": 1},
        OrderedDict(a=1),
        [],
        [{"a": 1}],
        ({"a": 1}, MappingProxyType({"a": 2})),
    ],
    ids=["none", "dict", "other dict", "no rows", "list", "tuple"],
)
def test_rows_of_a_table_are_none_one_or_several_mappings(lines):
    made = {"order_rm": {}, "line_rm": lines}
    assert read(made, tables=TABLES) == [made]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (({"a": n} for n in (1, 2)), "generator"),
        (map(dict, [{"a": 1}]), "map"),
        ({1: {"a": 1}}.values(), "dict_values"),
        ("", "str"),
        (0, "int"),
        ([{"a": 1}, None], "list of NoneType"),
    ],
    ids=["generator", "map", "values", "text", "number", "list"],
)
@pytest.mark.parametrize("several", [True, False], ids=["tables", "one table"])
def test_other_rows_of_a_table_are_refused(lines, wrong, several):
    made = {"order_rm": {}, "line_rm": lines} if several else lines
    with pytest.raises(BlockError) as caught:
        read(made, **(DECLARED["tables"] if several else DECLARED["side"]))
    assert caught.value.index == 0
    assert isinstance(caught.value.error, RecordError)
    told = str(caught.value.error)
    assert f"the type {wrong} for the table 'line_rm': return a mapping" in told


@pytest.mark.parametrize(
    "made", [iter(()), [], "", 0], ids=["iterator", "list", "text", "int"]
)
@pytest.mark.parametrize("kind", ["tables", "row"])
def test_what_is_no_mapping_of_columns_or_tables_is_refused(made, kind):
    with pytest.raises(BlockError) as caught:
        read(made, **DECLARED[kind])
    assert isinstance(caught.value.error, RecordError)
    told = f"has returned the type {type(made).__name__}: return a mapping"
    assert told in str(caught.value.error)
