"""Columns as arrays of texts: what PostgreSQL reads is what Python had."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from jobs_lib.consuming.arrays import make_writer, write_array

VALUES: dict[str, list[Any]] = {
    "text": ["", "a", 'quoted "b"', "back\\slash", "{,}", "NULL", "ünï\n\t", None],
    "bigint": [0, -(2**63), 2**63 - 1, None],
    "boolean": [True, False, None],
    "double precision": [1.5, math.inf, -0.0, None],
    "numeric": [Decimal("1.50"), None],
    "timestamp with time zone": [datetime(2026, 1, 2, 3, 4, 5, 678, UTC), None],
    "date": [date(2026, 1, 2), None],
    "interval": [timedelta(days=1, seconds=2), None],
    "uuid": [UUID(int=7), None],
    "bytea": [b"\x00\xff\\", None],
    "text[]": [["a", 'b"', None], [], None],
}


@pytest.mark.parametrize("kind", VALUES)
def test_each_value_comes_back_as_it_was(admin, kind):
    values = VALUES[kind]
    array = write_array(values, make_writer(admin))
    query = sql.SQL("select v::{} from unnest(%s::text[]) v").format(sql.SQL(kind))
    assert [row[0] for row in admin.execute(query, (array,))] == values


def test_json_comes_back_as_it_was(admin):
    values = [Jsonb({"a": ['"', "\\"]}), None]
    array = write_array(values, make_writer(admin))
    rows = admin.execute("select v::jsonb from unnest(%s::text[]) v", (array,))
    assert [row[0] for row in rows] == [{"a": ['"', "\\"]}, None]


def test_a_value_without_an_adapter_is_refused(admin):
    with pytest.raises(psycopg.ProgrammingError, match="cannot adapt type 'object'"):
        write_array([object()], make_writer(admin))
