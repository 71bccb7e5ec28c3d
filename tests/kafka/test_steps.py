"""A service reads, handles, stores and produces; it is killed at each step."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.apps import make_app, running
from tests.support.processes.pods import TOTALS, steps
from tests.support.records import produce, read_topic

pytestmark = pytest.mark.expects("fenced")

RECORDS = 400
KEYS = 8


@pytest.mark.guarantee("S23")
def test_a_block_is_read_handled_stored_and_answered_whatever_dies_meanwhile(
    database_url, connect, bootstrap_servers, topic, start_process, wait_for
):
    source, target = topic(2), topic(2, config={"cleanup.policy": "compact"})
    place = {
        "home": source,
        "kafka_bootstrap_servers": bootstrap_servers,
        # It is the same member again, so that a restart need not wait for the group.
        "kafka": {"group.instance.id": source},
    }
    admin = connect(autocommit=True)
    admin.execute(TOTALS)
    sent = [(f"k{n % KEYS}", n) for n in range(RECORDS)]
    produce(bootstrap_servers, source, [("bad", -1), *sent, ("bad", -2)])
    # Read and stored, not yet committed in Kafka; handled; produced, not yet deleted.
    for event in ("records.applied", "job.ran", "block.produced"):
        worker = start_process(
            "steps", database_url, target=target, dies_at={event: 2}, **place
        )
        code = worker.wait(timeout=60)
        assert code == -9, worker.output

    def left(table: str) -> int:
        return admin.execute(f"select count(*) from jobs_lib.{table}").fetchone()[0]

    app = make_app(database_url, **place)
    steps(app, target)
    with running(app):
        wait_for(
            lambda: (
                admin.execute("select sum(records) from totals").fetchone()
                == (RECORDS + 2,)
            ),
            timeout=60,
            what="all records are handled, those behind the bad one too",
        )
        wait_for(lambda: left("jobs") == 2, timeout=30, what="all other jobs have run")
        wait_for(lambda: left("outbox") == 0, timeout=30, what="all is produced")
    expected: defaultdict[str, list[int]] = defaultdict(list)
    for key, n in sent:
        expected[key].append(n)
    # The records have taken effect once, and the jobs, in order.
    totals = admin.execute("select * from totals where key <> 'bad'").fetchall()
    assert sorted(totals) == sorted((k, len(v), sum(v)) for k, v in expected.items())
    states = admin.execute("select * from states").fetchall()
    assert sorted(states) == sorted(totals)
    found: defaultdict[str, list[int]] = defaultdict(list)
    newest = {}
    for record in read_topic(bootstrap_servers, target):
        newest[record.key] = (int(record.headers["ce_version"]), record.json["sum"])
        found[record.key].append(record.json["last"])
    # At least once, in order: a repeated block begins again from its first record.
    for key, told in found.items():
        assert list(dict.fromkeys(told)) == expected[key]
    assert newest == {key: (version, total) for key, version, total in states}
    bad = admin.execute(
        "select \"group\", payload->>'n' from jobs_lib.jobs order by id"
    )
    assert bad.fetchall() == [("bad", "-1"), ("bad", "-2")]
