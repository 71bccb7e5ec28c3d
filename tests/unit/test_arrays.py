"""Columns as arrays of texts: PostgreSQL reads what Python had."""

from __future__ import annotations

import pytest

from jobs_lib.consuming.arrays import write_array


def refuse(value: object) -> str:
    raise AssertionError(f"{value!r} is simple")


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([], "{}"),
        (["a", "b"], '{"a","b"}'),
        ([""], '{""}'),
        (["NULL", None], '{"NULL",NULL}'),
        (['a"b', "c\\d", ","], '{"a\\"b","c\\\\d",","}'),
        (['","'], '{"\\",\\""}'),
        ([1, -2], "{1,-2}"),
        ([1, None], '{"1",NULL}'),
        ([None], "{NULL}"),
    ],
)
def test_simple_values_are_written_without_an_adapter(values, written):
    assert write_array(values, refuse) == written


def test_other_values_are_written_by_the_adapters():
    assert write_array([True, 2], lambda value: f"<{value}>") == '{"<True>","<2>"}'
