"""The limits from which a check warns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jobs_lib.operating import Limits
from jobs_lib.operating.checks.server import check_multixacts


@pytest.mark.parametrize(
    ("age", "limit", "levels"),
    [
        (319_999_999, 0.8, []),
        (320_000_000, 0.8, ["warn"]),
        (799_999_999, 0.8, ["warn"]),
        (800_000_000, 0.8, ["error"]),
        # Not before autovacuum lags behind, however low the warning limit is.
        (799_999_999, 0.1, ["warn"]),
        (999_999_999, 1.0, ["warn"]),
        (1_000_000_000, 1.0, ["error"]),
    ],
)
def test_the_age_of_multixacts_warns_early_and_is_an_error_late(age, limit, levels):
    look: Any = SimpleNamespace(
        rows=lambda _: [(age, 400_000_000)], limits=Limits(multixacts=limit)
    )
    assert [finding.level for finding in check_multixacts(look)] == levels


def test_the_default_warns_from_four_fifths_on():
    assert Limits().multixacts == 0.8
