"""The check: it names each wrong set-up, with a way out."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.errors import UnavailableError
from jobs_lib.operating import Limits, check
from jobs_lib.operating.checks import CHECKS
from jobs_lib.postgres.database import Database
from jobs_lib.settings import load_settings
from tests.operating import faults
from tests.operating.helpers import add_job, add_owner
from tests.support.records import make_producer

if TYPE_CHECKING:
    from jobs_lib.operating import Finding

LOW = Limits(dead_rows=1_000, index_bytes=200_000, unanalyzed_rows=1_500, behind=10)


def findings(
    database: Database, *, settings: Any = None, **given: Any
) -> list[Finding]:
    """Return the faults; wait for a server or pooler that is still starting."""
    with contextlib.suppress(UnavailableError):
        found = check(database, settings or load_settings(), **given)
        return [one for one in found if one.level != "ok"]
    return []


def test_a_fresh_database_is_in_order(database, connect, command):
    admin = connect(autocommit=True)
    # Its next heartbeat never comes, and a busy machine needs time for two checks.
    add_owner(admin, silent=-60)
    add_job(admin)
    found = check(database, load_settings())
    assert [one.check for one in found] == ["schema", *CHECKS]
    assert {one.level for one in found} == {"ok"}, found
    result = command("check", "--json")
    assert result.exit_code == 0
    assert {row["level"] for row in json.loads(result.output)} == {"ok"}
    faults.old_schema(faults.Bench(admin, database, None))  # type: ignore[arg-type]
    result = command("check")
    assert result.exit_code == 1
    assert "have version 0001" in result.output


@pytest.mark.guarantee("J25", "FJ18")
@pytest.mark.parametrize(
    ("fault", "level", "name", "what", "way_out"),
    [
        (faults.old_schema, "error", "schema", "have version 0001", "migrate"),
        (faults.weak_role, "error", "privileges", "lacks .* more", "grants service"),
        (
            faults.function_without_path,
            "error",
            "functions",
            r"note_touch\(\) finds a session's temporary tables before ours",
            "set search_path = ",
        ),
        (
            faults.function_for_everybody,
            "error",
            "functions",
            r"everybody may call .*note_touch\(\), which has the rights of postgres",
            "revoke execute on routine jobs_lib.note_touch() from public",
        ),
        (
            faults.schema_for_everybody,
            "error",
            "functions",
            "everybody may create functions .* in the schema jobs_lib",
            'revoke create on schema "jobs_lib" from public',
        ),
        (faults.autovacuum_off, "error", "autovacuum", "autovacuum is off", "= on;"),
        (faults.counts_off, "error", "autovacuum", "track_counts is off", "= on;"),
        (faults.long_naptime, "warn", "autovacuum", "naptime is 90 s", "alter system"),
        (
            faults.table_without_autovacuum,
            "error",
            "autovacuum",
            "off for the table jobs",
            'alter table "jobs_lib"."jobs" reset',
        ),
        (
            faults.old_transaction,
            "warn",
            "oldest transaction",
            r"transaction \d+ of nightly report is open .*idle in transaction",
            "pg_terminate_backend",
        ),
        (
            faults.very_old_transaction,
            "error",
            "oldest transaction",
            "nightly report",
            "pg_terminate_backend",
        ),
        (
            faults.blind_role,
            "warn",
            "oldest transaction",
            "does not see the transactions of other roles",
            "grant pg_read_all_stats",
        ),
        (faults.dead_rows, "warn", "bloat", "jobs has 1,900 dead rows", "vacuum"),
        (faults.grown_index, "warn", "bloat", "index jobs_pkey has", "reindex index"),
        (faults.no_statistics, "warn", "statistics", "2,000 rows.*never", "analyze"),
        (
            faults.blocked_group,
            "warn",
            "blocked groups",
            "12 jobs of group 'customer-12' .* behind job 1, .*9 times: HTTP 503",
            "jobs cancel 1",
        ),
        (
            faults.stopped_partition,
            "error",
            "stopped partitions",
            "^it's/3 .*'shop' .*at offset 4711 since 2026-01-02 03.* UTC: LookupError",
            "= 4712 where consumer_group = 'shop' and topic = 'it''s' and partition =",
        ),
        (
            faults.stopped_at_the_start,
            "error",
            "stopped partitions",
            "at offset 0 since",
            "set next_offset = 1",
        ),
        (
            faults.skipped_records,
            "warn",
            "skipped records",
            "^3 skipped in it's/3 .*'shop' since 2026-01-02 .* offset 7: .*Error: 7$",
            """`jobs-lib readmodel replay MODULE:APP 'it'"'"'s' --group shop`;""",
        ),
        (
            faults.row_deleted_by_hand,
            "warn",
            "outbox",
            r"postgres \(psql\) has changed the outbox by DELETE 2 times",
            'delete from "jobs_lib".touched',
        ),
        (faults.row_changed_by_hand, "warn", "outbox", "by UPDATE 1", "export again"),
        (faults.outbox_truncated, "warn", "outbox", "unnamed.* TRUNCATE 1", "export"),
        (
            faults.capture_off,
            "error",
            "outbox",
            "jobs_lib_capture of the table aircraft is switched off",
            'alter table "public"."aircraft" enable trigger "jobs_lib_capture"',
        ),
        (
            faults.truncate_unseen,
            "warn",
            "outbox",
            "the table aircraft is captured, and a truncate of it is not",
            'create trigger jobs_lib_capture_truncate before truncate on "public".',
        ),
        (faults.notes_off, "error", "outbox", "touched of .* outbox is", "enable"),
        (faults.nobody_owns, "error", "owners", "live owner: local/11", "start an"),
        (faults.dead_owner, "error", "owners", "live owner: local/12", "start an"),
        (
            faults.unknown_type,
            "error",
            "types",
            "type gone wait in local/13, and no executor",
            "start an executor of the application that declares gone",
        ),
        (
            faults.types_apart,
            "error",
            "types",
            "type theirs wait in local/14, whose owner does not know",
            "a name of its own",
        ),
        (
            faults.old_multixacts,
            "warn",
            "multixacts",
            r"oldest multixact is [\d,]+ old.*400,000,000",
            "vacuumdb --min-mxid-age",
        ),
        (
            faults.undeclared_topic,
            "error",
            "owners",
            "nowhere/2",
            "topics declare MODULE:APP",
        ),
        (faults.missing_topic, "error", "topics", "gone .* not have it", "create it"),
        (faults.shrunk_topic, "error", "topics", "4 .* and 6 are recorded", "give it"),
        (faults.grown_topic, "warn", "topics", "4 .* and 3 are recorded", "switched"),
        (faults.kafka_away, "error", "topics", "no Kafka broker at 127", "see there"),
        (
            faults.transaction_pooling,
            "warn",
            "pooler",
            "in transaction mode",
            "max_prepared_statements",
        ),
        (
            faults.group_elsewhere,
            "warn",
            "partitioner",
            "1 of the sampled groups .* customer-12 in local/",
            "by hand",
        ),
        (
            faults.no_reexport_index,
            "warn",
            "outbox",
            "lacks the index outbox_of_reexport",
            "create index concurrently outbox_of_reexport",
        ),
        (
            faults.row_elsewhere,
            "error",
            "partitioner",
            "outbox rows .*than SHA-256 of topic and key gives: states a",
            "send",
        ),
        (faults.other_partitioner, "error", "partitioner", "=consistent", "remove it"),
        (
            faults.foreign_producer,
            "error",
            "partitioner",
            "of 40 sampled records",
            "set partitioner=murmur2_random",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_check_names_each_fault_with_the_way_out(
    database, connect, wait_for, request, fault, level, name, what, way_out
):
    bench = faults.Bench(connect(autocommit=True), database, request)
    with bench.undo:
        given = {"limits": LOW, "database": database, **(fault(bench) or {})}

        def named() -> list[Finding]:
            return [
                one
                for one in findings(**given)
                if (one.level, one.check) == (level, name) and re.search(what, one.what)
            ]

        (found, *_) = wait_for(named, what=lambda: f"it is named: {findings(**given)}")
    assert way_out in found.way_out


def test_a_partition_whose_record_was_passed_over_is_in_order(database, connect):
    admin = connect(autocommit=True)
    faults.stopped_partition(faults.Bench(admin, database, None))  # type: ignore[arg-type]
    (found,) = findings(database)
    admin.execute(found.way_out.partition("the record over: ")[2])
    assert findings(database) == []


def test_the_way_out_of_missing_privileges_works(database, connect, command, request):
    admin = connect(autocommit=True)
    bench = faults.Bench(admin, database, request)
    with bench.undo:
        role = faults.weak_role(bench)["role"]
        bench.undo.callback(admin.execute, f"drop owned by {role}")
        (found,) = findings(database, role=role)
        assert found.way_out.startswith(f"jobs-lib grants service {role} --apply")
        assert command("grants", "service", role, "--apply").exit_code == 0
        assert findings(database, role=role) == []
        admin.execute(f"revoke delete on jobs_lib.jobs from {role}")
        result = command("check", "--role", role)
        assert f"{role} lacks delete on jobs" in result.output
        assert result.exit_code == 1
    (found,) = findings(database, role="nobody_of_this_name")
    assert "no role" in found.what


@pytest.mark.guarantee("FS14")
@pytest.mark.parametrize(
    "fault",
    [
        faults.function_without_path,
        faults.function_for_everybody,
        faults.schema_for_everybody,
    ],
    ids=lambda value: value.__name__,
)
def test_the_way_out_of_an_unsafe_function_works(database, connect, request, fault):
    admin = connect(autocommit=True)
    fault(faults.Bench(admin, database, request))
    (found,) = findings(database)
    admin.execute(found.way_out)
    assert findings(database) == []


def test_a_pooler_in_session_mode_changes_nothing(database, wait_for, tmp_path_factory):
    if faults.PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    folder = tmp_path_factory.mktemp("pgbouncer")
    with faults.pgbouncer(folder, database.url, "session") as url:
        through = Database(url, database.schema)

        def answers() -> list[Finding]:
            with contextlib.suppress(UnavailableError):
                return check(through, load_settings())
            return []

        found = wait_for(answers, what="it answers")
    assert {one.level for one in found} == {"ok"}
    assert any("in session mode" in one.what for one in found)


def test_records_that_fit_are_in_order(database, bootstrap_servers, topic):
    name = topic(4)
    with database.connect("test") as connection:
        connection.execute("insert into jobs_lib.topics values (%s, 4)", (name,))
    producer = make_producer(bootstrap_servers)
    for n in range(40):
        producer.produce(name, key=f"key-{n}", value=b"")
    producer.flush(10)
    settings = load_settings(kafka_bootstrap_servers=bootstrap_servers)
    assert findings(database, settings=settings) == []


@pytest.mark.guarantee("M21")
def test_a_coordination_log_that_loses_records_is_named(
    database, bootstrap_servers, topic
):
    name = topic(2)
    settings = load_settings(
        kafka_bootstrap_servers=bootstrap_servers, coordination_topic=name
    )
    found = findings(database, settings=settings)
    assert {one.check for one in found} == {"coordination log"}
    assert any("message.timestamp.type=CreateTime" in one.what for one in found)
    missing = load_settings(
        kafka_bootstrap_servers=bootstrap_servers, coordination_topic="no-log"
    )
    (one,) = findings(database, settings=missing)
    assert (one.level, one.way_out) == (
        "error",
        "jobs-lib coordination create --log no-log",
    )


def test_a_coordination_log_is_checked_for_the_interval_that_is_set(
    database, bootstrap_servers, topic
):
    # Enough for intervals of ten seconds, and not for those of a minute.
    name = topic(2, config=WANTED | {"retention.ms": "3600000"})
    settings = load_settings(
        kafka_bootstrap_servers=bootstrap_servers,
        coordination_topic=name,
        coordination_interval=60.0,
    )
    found = findings(database, settings=settings)
    # One broker is a warning.
    assert [one.level for one in found] == ["error", "warn"]
    assert "retention.ms=3600000" in found[0].what
