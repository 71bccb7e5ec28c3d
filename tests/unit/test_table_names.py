"""The name of a table, as an application gives it, in SQL."""

from __future__ import annotations

import pytest

from jobs_lib.postgres.values import identify, split_table


@pytest.mark.parametrize(
    ("given", "schema", "name", "in_sql"),
    [
        ("orders", None, "orders", '"orders"'),
        ("shop.orders", "shop", "orders", '"shop"."orders"'),
        ("shop.orders.2026", "shop", "orders.2026", '"shop"."orders.2026"'),
        ('a"; drop', None, 'a"; drop', '"a""; drop"'),
    ],
)
def test_the_schema_of_a_table_ends_at_the_first_dot(given, schema, name, in_sql):
    assert split_table(given) == (schema, name)
    assert identify(given).as_string() == in_sql
