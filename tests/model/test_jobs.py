"""Random histories of jobs: every step is compared with the model.

Set MODEL_EXAMPLES to a number to run this many histories, new ones each time. Set
MODEL_SHRINKS to shorten a history that fails.
"""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.bench import Bench
from tests.model.machine import Jobs


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("I1", "I3", "I8")
def test_random_histories_of_jobs_keep_to_the_model(database):
    bench = Bench(database)
    longer = os.environ.get("MODEL_EXAMPLES")
    shrinks = "MODEL_SHRINKS" in os.environ
    try:
        run_state_machine_as_test(
            cast("Any", lambda: Jobs(bench)),
            settings=settings(
                max_examples=int(longer or 50),
                stateful_step_count=50,
                derandomize=not longer,
                database=None,
                # A history is shown in full, since to shorten it takes minutes.
                phases=[Phase.generate, Phase.shrink][: 2 if shrinks else 1],
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        bench.close()
