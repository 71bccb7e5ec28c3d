"""The service of docs/upgrading.md, which renames a type."""

from __future__ import annotations

from tests.support.pages import write_modules


def test_a_job_of_the_earlier_name_runs_by_the_renamed_handler(
    tmp_path, database_url, admin, run_process
):
    assert write_modules("docs/upgrading.md", tmp_path) == ["shop.py"]
    admin.execute(
        "select jobs_lib.enqueue('send_invoice', payload => %s, \"group\" => 'ada')",
        ('{"customer": "ada", "order": 7}',),
    )
    service = run_process(
        "-m",
        "jobs_lib.cli",
        "run",
        "shop:app",
        env={"PYTHONPATH": f".:{tmp_path}", "JOBS_LIB_DATABASE_URL": database_url},
    )
    service.wait_for_line("send_invoice: order 7 to ada")
