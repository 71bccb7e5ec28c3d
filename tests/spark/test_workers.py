"""Why a task has failed is said in one line, with the host and without values."""

from __future__ import annotations

import importlib
import sys

import pytest

from jobs_lib.app import App
from jobs_lib.errors import ReexportError
from jobs_lib.outbox.topic import Entity
from jobs_lib.settings import Settings
from spark_bridge import workers
from spark_bridge.frames import reading
from spark_bridge.loader import Target
from spark_bridge.staging import StateEncoder
from spark_bridge.workers import explain, make_encoder_probe, make_probe

JOB = (
    "An error occurred while calling o61.collectToPython.\n: org.apache.spark."
    "SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 "
    "times, most recent failure: Lost task 0.3 in stage 0.0 (TID 7) (10.0.0.9 executor "
    "0): {}\n\tat java.base/java.lang.ProcessBuilder.start(Unknown Source)\n"
)
TASK = (
    "An exception was thrown from the Python worker:\nTraceback (most recent call "
    'last):\n  File "worker.py", line 4207, in invoke_udf\n    func = read()\n{}\n\n'
    "JVM stacktrace:\norg.apache.spark.api.python.PythonException: no: this\n"
)


def fail(text):
    """An error of a Python worker, with that of the job behind it."""
    try:
        try:
            raise RuntimeError(JOB.format("org.apache.spark.api.python.PythonExc…"))
        except RuntimeError:
            raise ValueError(TASK.format(text)) from None
    except ValueError as error:
        return str(explain(error))


def test_a_program_that_is_not_there_is_named_with_host_and_way_out():
    reason = 'java.io.IOException: Cannot run program "/none/python": error: 2'
    text = str(explain(RuntimeError(JOB.format(reason))))
    assert text.startswith(f"a task of Spark failed on 10.0.0.9: {reason}. The workers")
    assert "--packed FILE" in text
    assert "\n" not in text


def test_a_missing_package_and_another_python_are_named_with_the_host():
    text = fail("ModuleNotFoundError: No module named 'pyarrow'")
    assert "failed on 10.0.0.9: ModuleNotFoundError: No module named 'pyarrow'" in text
    assert "--packed FILE" in text
    text = fail(
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH]"
        " Python in worker has different version: 3.12 than that in driver: 3.11.\n"
        "Please check environment variables."
    )
    assert "3.12 than that in driver: 3.11" in text
    assert "--packed FILE" in text
    assert "\n" not in text


def test_our_own_error_is_told_as_it_is():
    text = fail("jobs_lib.errors.ReexportError: the re-export 1 has no range 77")
    assert text == "a task of Spark on 10.0.0.9: the re-export 1 has no range 77"


@pytest.mark.guarantee("X15")
def test_an_error_of_the_database_is_told_without_its_values():
    text = fail(
        'psycopg.errors.InvalidTextRepresentation: invalid input: "ada\'s value"\n'
        'CONTEXT:  unnamed portal parameter $1 = "ada"'
    )
    assert "psycopg.errors.InvalidTextRepresentation" in text
    assert "ada" not in text
    assert "start again" in text


def test_an_error_without_any_text_is_told():
    assert "failed: unknown" in str(explain(RuntimeError("")))


def test_a_probe_names_what_is_missing(database, monkeypatch):
    ready = (database.url, database.schema, False, 30.0)
    assert make_probe(*ready)(0) is None
    away = make_probe("postgresql://a:canary-pass@127.0.0.1:1/x", *ready[1:])(0)
    assert away is not None
    assert "does not reach the database" in away
    assert "canary-pass" not in away
    unknown = make_probe("postgresql://?service=unknown", *ready[1:])(0)
    assert unknown is not None
    assert "unknown" in unknown
    monkeypatch.setattr(workers, "__version__", "9.9.9")
    other = make_probe(*ready)(0)
    assert other is not None
    assert "and this process 9.9.9" in other


@pytest.mark.guarantee("X13")
def test_a_probe_names_the_module_of_the_application_that_is_missing(
    tmp_path, monkeypatch
):
    (tmp_path / "absent_states.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass\nclass Plane:\n    tail: str\n    version: int\n"
    )
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        module = importlib.import_module("absent_states")
        topic = App("test", settings=Settings()).topic(
            "planes", value=module.Plane, compacted=True, partitions=1
        )
        entity = Entity("planes", topic, "planes", "tail", lambda _, __: {})
        probe = make_encoder_probe(StateEncoder.of(entity))
        assert probe(0) is None
    del sys.modules["absent_states"]
    told = probe(0)
    assert told is not None
    assert "No module named 'absent_states'" in told
    assert "--module NAME" in told


def test_a_frame_whose_task_lacks_a_module_is_refused_with_the_way_out():
    text = TASK.format("ModuleNotFoundError: No module named 'absent_states'")
    with pytest.raises(ReexportError) as told, reading(None):
        raise ValueError(text)
    assert "No module named 'absent_states'. The workers need" in str(told.value)
    with pytest.raises(ReexportError, match="read: ValueError: odd"), reading(None):
        raise ValueError("odd")


@pytest.mark.slow
def test_jobs_end_when_no_executor_is_there_for_too_long(spark, monkeypatch):
    monkeypatch.setattr(workers, "count_executors", lambda _: 0)
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    monkeypatch.setattr(workers, "_LOOK_EVERY", 0.05)

    def wait(batches):
        import time

        yield from batches
        time.sleep(3)

    frame = spark.range(1).mapInArrow(wait, "id long")
    ended = pytest.raises(ReexportError, match=r"no executor for 0\.2 s")
    with ended, workers.watching(spark):
        frame.collect()
    # Other jobs of the session are not ended.
    monkeypatch.setattr(workers, "PATIENCE", 60)
    with workers.watching(spark):
        assert spark.range(3).count() == 3


def test_a_task_of_another_release_is_refused(database):
    target = Target(database.url, database.schema, release="0.0.9")
    with pytest.raises(ReexportError, match=r"started it 0\.0\.9"):
        target.database()
