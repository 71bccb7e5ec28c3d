"""The statements of an executor are found in a server's log."""

from __future__ import annotations

import pytest

from benchmarks.replay import ReplayError, make_script, read_statements

LOG = """\
2026-11-21 07:00:1 UTC [10] LOG:  execute _pg3_0: select $1::text,
\t    '5 %', $2, $1
2026-11-21 07:00:1 UTC [10] DETAIL:  Parameters: $1 = 'it''s, $9 = ''x''', $2 = NULL
2026-11-21 07:00:2 UTC [11] LOG:  statement: BEGIN
2026-11-21 07:00:3 UTC [10] LOG:  execute <unnamed>: delete from t where id = any ($1)
2026-11-21 07:00:3 UTC [10] DETAIL:  Parameters: $1 = '{1,2}'
2026-11-21 07:00:4 UTC [10] LOG:  execute _pg3_0: select $1::text,
\t    '5 %', $2, $1
2026-11-21 07:00:4 UTC [10] DETAIL:  Parameters: $1 = 'b', $2 = '3'
"""
ASK = "select %(a)s::text,\n    '5 %%', %(b)s, %(a)s"


def test_a_logged_statement_comes_with_its_values_as_literals():
    assert list(read_statements(LOG)) == [
        ("select $1::text,\n    '5 %', $2, $1", ["'it''s, $9 = ''x'''", "NULL"]),
        ("delete from t where id = any ($1)", ["'{1,2}'"]),
        ("select $1::text,\n    '5 %', $2, $1", ["'b'", "'3'"]),
    ]


def test_a_script_prepares_a_query_once_and_keeps_to_those_that_were_named():
    script, counts = make_script(read_statements(LOG), {"ask": ASK})
    assert counts == {"ask": 2}
    assert script == (
        "prepare replay_ask as select $1::text,\n    '5 %', $2, $1;\n"
        "execute replay_ask ('it''s, $9 = ''x''', NULL);\n"
        "execute replay_ask ('b', '3');\n"
    )


def test_a_query_that_was_never_sent_is_named():
    with pytest.raises(ReplayError, match="the executor sent no other"):
        make_script(read_statements(LOG), {"ask": ASK, "other": "select 2"})
