"""Nothing that is stored names code to run: not a job's type, nor its payload."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from tests.support.apps import HOME, executing, heard, make_app

NAMES = (
    *("os.system", "builtins.eval", "builtins:exec", "subprocess.run"),
    *("__import__", "tests.support.apps:make_app", "work.__globals__", "work.run"),
)


@pytest.mark.guarantee("FS8")
def test_a_job_whose_type_is_the_name_of_a_function_runs_nothing(
    database_url, admin, connect, wait_for, tmp_path
):
    app = make_app(database_url)
    ran: list[str] = []

    @app.job()
    def work(job, command: str) -> None:
        ran.append(command)

    made = tmp_path / "made"
    # As a command, and as what a pickle of one looks like.
    commands = [f"touch {made}", f"cposix\nsystem\n(S'touch {made}'\ntR."]
    for name in NAMES:
        for command in commands:
            admin.execute(
                "insert into jobs_lib.jobs (origin, type, payload)"
                " values ('local/1', %s, %s)",
                (name, Jsonb({"command": command})),
            )
    with heard("jobs.unknown") as unknown, executing(app, HOME):
        with connect() as connection:
            for command in commands:
                work.options(origin="local/1").enqueue(connection, command=command)
        wait_for(
            lambda: {fields["type"] for _, fields in unknown} == {*NAMES},
            what="they are told of",
        )
        wait_for(lambda: len(ran) == len(commands), what="the others run")
    assert sorted(ran) == sorted(commands)
    assert not made.exists()
    waiting = admin.execute(
        "select type, count(*), max(attempt) from jobs_lib.jobs group by type"
    ).fetchall()
    assert sorted(waiting) == sorted((name, len(commands), 0) for name in NAMES)
