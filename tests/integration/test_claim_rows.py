"""The columns of the claim's statements have the same names in Python and SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import Mock
from uuid import UUID

import pytest

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.rows import ClaimRow, HorizonRow, JumpRow
from jobs_lib.executor.limiting.gate import JobGate
from jobs_lib.executor.section import divide
from jobs_lib.postgres.queries import load_queries
from tests.support.apps import HOME

if TYPE_CHECKING:
    from jobs_lib import Job

ORIGIN = HOME[0]


@pytest.fixture
def claimer(app):
    """A claimer of types with a limit for each value or without one, gated or not."""

    @app.job()
    def work(job: Job) -> None: ...

    @app.job(limit=(1, "tenant"))
    def call(job: Job, tenant: str) -> None: ...

    @app.job(after=[("t", "g")])
    def wait(job: Job) -> None: ...

    @app.job(limit=(1, "tenant"), after=[("t", "g")])
    def both(job: Job, tenant: str) -> None: ...

    sections = {(one.parameter, bool(one.after)): one for one in divide(app.jobs)}

    def make(parameter: str | None, gated: bool) -> Claimer:
        section = sections[parameter, gated]
        gate = JobGate(section.types, section.after, Mock(), 1.0) if gated else None
        claimer = Claimer(
            UUID(int=1), UUID(int=2), app.jobs, section=section, gate=gate
        )
        claimer.gated.look()
        claimer.take({ORIGIN: 1})
        cursor = claimer.cursors[ORIGIN]
        cursor.seen = cursor.may_have_more = True
        return claimer

    return make


@pytest.fixture
def columns(connect):
    """A function that sends a statement and returns the names of its columns."""

    def columns(name, parameters) -> tuple[str, ...]:
        query = load_queries("jobs_lib")[name]
        description = connect().execute(query, parameters).description
        assert description
        return tuple(column.name for column in description)

    return columns


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("parameter", [None, "tenant"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_claim_has_the_columns_that_its_reader_names(
    claimer, columns, parameter, gated, plain
):
    one = claimer(parameter, gated)
    one.cursors[ORIGIN].all_plain = plain
    name, parameters = one.prepare(10)
    assert name.startswith("claim_plain") is plain
    fields = ClaimRow._fields if parameter else ClaimRow._fields[:-1]
    assert columns(name, parameters) == fields


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("parameter", [None, "tenant"])
def test_a_jump_has_the_columns_that_its_reader_names(
    claimer, columns, parameter, gated
):
    one = claimer(parameter, gated)
    one.cursors[ORIGIN].jump_factor = 2
    assert columns(*one.prepare_jump(10)) == JumpRow._fields


def test_a_horizon_has_the_columns_that_its_reader_names(columns):
    assert columns("horizon", {}) == HorizonRow._fields
