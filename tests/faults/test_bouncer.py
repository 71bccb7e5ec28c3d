"""The library does all its work through PgBouncer with few server connections."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from alembic import command as alembic
from alembic.config import Config
from click.testing import CliRunner

from jobs_lib import ConfigurationError, EntityState, exponential, reexport
from jobs_lib.cli.main import cli
from jobs_lib.devstack.ports import free_port
from jobs_lib.operating.dropping import drop_version
from jobs_lib.operating.gates import list_gates
from jobs_lib.operating.growth import grow
from jobs_lib.operating.read_models import list_read_models
from jobs_lib.operating.switching import switch
from jobs_lib.operating.verification import (
    FileSide,
    TableSide,
    verify,
    write_keys,
)
from jobs_lib.operating.where import where
from jobs_lib.partitioner import choose_partition
from jobs_lib.postgres import migrate as migrations
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.revisions import check_version, known_versions
from jobs_lib.reasons import POOLER, hints_at_pooler
from jobs_lib.service.resync import resync
from jobs_lib.settings import default_settings, load_settings
from spark_bridge.loader import Target, make_task
from tests.faults.helpers import attempts, count, effects, enqueue
from tests.operating import faults
from tests.operating.helpers import add_discarded, add_job
from tests.support.apps import heard, make_app, running
from tests.support.command_line import leaves
from tests.support.records import produce, read_topic
from tests.support.shop import Item, declare_items

needs_pgbouncer = pytest.mark.skipif(
    faults.PGBOUNCER is None, reason="pgbouncer is not installed"
)
APP = "service_of_test:app"
_TIMES = 7
"""More often than the driver waits before it prepares a statement."""
COMMANDS = [
    "migrate",
    "owners",
    *("grants read postgres", "grants service postgres --apply"),
    *("jobs list", "jobs show {job}", "jobs explain {job}"),
    *("jobs pause type work", "jobs pauses", "jobs resume type work"),
    *("jobs cancel {job}", "jobs retry {discarded}", "jobs delete --all"),
    *("jobs cancel {discarded}", "jobs maintain"),
    *("outbox status", "outbox status --holds", "outbox show {row}", "outbox retry"),
    "outbox drop {row} --yes",
    *(f"topics declare {APP} items --partitions 4", f"topics repartition {APP} 16"),
    f"topics status {APP}",
    *(f"reexport plan items --rate 1000 --app {APP}", f"reexport list --app {APP}"),
    f"reexport start items --rate 1000 --engine sql --app {APP}",
    f"reexport watch-lag items off --app {APP}",
    *(f"reexport {one} items --app {APP}" for one in ("pause", "status", "resume")),
    *(f"reexport rate items 2000 --app {APP}", f"reexport cancel items --app {APP}"),
    f"readmodel replay {APP} items",
    "check --json",
]
"""In this order each command succeeds; the last one runs when no job is left."""
SERVICES = ["run", "executor", "relay", "jobs enqueue"]
SERVICES += ["readmodel resync", "readmodel status", "readmodel verify"]
SERVICES += ["readmodel keys", "readmodel switch", "readmodel drop", "where", "gates"]
SERVICES += ["topics grow"]
SERVICES += ["reexport stale", "reexport rebuild", "reexport switch"]
"""The other tests here run these; `jobs enqueue` enqueues as every caller does."""
WITHOUT_DATABASE = [
    *("topics plan", "topics apply", "topics check"),
    *("schemas check", "schemas register"),
    *("dev up", "dev down", "dev env", "dev status", "readmodel create"),
    "reexport pack",
    *(f"coordination {one}" for one in ("show", "check", "create", "set-position")),
    *(f"coordination {one}" for one in ("pause", "resume", "release")),
]


@pytest.fixture
def servers():
    """The number of server connections that PgBouncer may have."""
    return 2


@pytest.fixture
def bounced(url, tmp_path_factory, servers):
    """The URL through PgBouncer in transaction mode, with a pool of `servers`."""
    folder = tmp_path_factory.mktemp("pgbouncer")
    with faults.pgbouncer(folder, url, "transaction", size=servers) as bounced:
        yield bounced


@pytest.fixture
def unspoilt(url, bounced):
    """Fail if a session behind it keeps a setting or a prepared statement.

    PgBouncer lends the session to other clients next.
    """
    yield
    assert_unspoilt(url, bounced)


def assert_unspoilt(url, bounced):
    look = (
        "select current_setting('plan_cache_mode'), current_setting('jit'),"
        " current_setting('enable_seqscan'), current_setting('search_path'),"
        " current_setting('lock_timeout'), (select count(*) from"
        " pg_prepared_statements), (select count(*) from pg_locks"
        " where locktype = 'advisory' and pid = pg_backend_pid())"
    )
    with psycopg.connect(url) as fresh:
        expected = fresh.execute(look).fetchone()
    # The two transactions are open at once, so they use both servers.
    with psycopg.connect(bounced) as one, psycopg.connect(bounced) as other:
        for connection in (one, other):
            found = connection.execute(look, prepare=False).fetchone()
            assert found == expected


def find_refused(failures):
    """Return the failures of PgBouncer alone: Kafka's may come from a busy machine."""
    errors = [fields["error"] for _, fields in failures]
    return [one for one in errors if isinstance(one, psycopg.Error | str)]


def test_every_command_that_opens_a_database_is_tried_here():
    known = [*COMMANDS, *SERVICES, *WITHOUT_DATABASE]
    for leaf in leaves(cli):
        assert any(f"{one} ".startswith(f"{leaf} ") for one in known), leaf


def add_held(connection: psycopg.Connection[Any], row: int) -> int:
    """Add a row that is held; return its id."""
    connection.execute(
        "insert into jobs_lib.held_rows"
        " (shard, class, id, topic, key, value, cause, created_at)"
        " values (0, 0, %s, 'items', 'a', '', 'live', now())",
        [row],
    )
    connection.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('items', 'a', 'boom', now())"
    )
    return row


@needs_pgbouncer
@pytest.mark.guarantee("J21")
@pytest.mark.usefixtures("unspoilt")
def test_every_command_works_behind_pgbouncer(url, bounced, admin, monkeypatch):
    app = make_app(bounced, pgbouncer=True)
    items = app.topic("items", value=Item)
    app.entity(items, source="items", key="id")(lambda connection, keys: {})
    app.consumer("items", group="g", repeatable=True)(lambda record, conn: None)
    module = types.ModuleType("service_of_test")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service_of_test", module)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", bounced)
    monkeypatch.setenv("JOBS_LIB_PGBOUNCER", "true")
    default_settings.cache_clear()
    admin.execute("create table items (id int primary key, name text, version bigint)")
    admin.execute("insert into items select g, 'n', 1 from generate_series(1, 50) g")
    # More often than the driver waits before it prepares a statement.
    for turn in (1, 2):
        ids = {
            "job": add_job(admin),
            "discarded": add_discarded(admin),
            "row": add_held(admin, turn),
        }
        add_discarded(admin)
        for command in COMMANDS:
            words = command.format(**ids)
            if words.startswith("check"):
                admin.execute("delete from jobs_lib.jobs")
            done = CliRunner().invoke(cli, words.split())
            assert done.exit_code == 0, (words, done.output, done.exception)


def migrate_by_command(settings):
    done = CliRunner().invoke(cli, ["migrate"])
    assert done.exit_code == 0, (done.output, done.exception)


def migrate_by_code(settings):
    migrations.migrate(migrations.choose_url(settings), settings=settings)


def migrate_by_alembic(settings):
    alembic.upgrade(Config("alembic.ini"), "head")


@pytest.fixture(params=[migrate_by_command, migrate_by_code, migrate_by_alembic])
def migrate(request, monkeypatch):
    """A function that installs the tables, with these settings in the environment."""

    def run(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"JOBS_LIB_{name.upper()}", value)
        default_settings.cache_clear()
        request.param(default_settings())

    return run


@needs_pgbouncer
@pytest.mark.guarantee("J21", "FP10")
def test_the_tables_are_installed_through_pgbouncer(
    empty_url, migrate, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("pgbouncer")
    with faults.pgbouncer(folder, empty_url, "transaction", size=2) as bounced:
        for _ in range(2):
            migrate(database_url=bounced, pgbouncer="true")
        assert_unspoilt(empty_url, bounced)
    assert check_version(Database(empty_url)) == known_versions()[-1]


@needs_pgbouncer
@pytest.mark.guarantee("J21", "FP10")
def test_migrations_that_wait_for_others_leave_nothing_prepared(
    empty_url, monkeypatch, tmp_path_factory, wait_for
):
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.02)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", empty_url)
    default_settings.cache_clear()
    alembic.upgrade(Config("alembic.ini"), "head")
    alembic.downgrade(Config("alembic.ini"), "-1")
    folder = tmp_path_factory.mktemp("pgbouncer")
    with faults.pgbouncer(folder, empty_url, "transaction", size=2) as bounced:
        migrating = threading.Thread(target=migrations.migrate, args=(bounced,))
        with psycopg.connect(empty_url) as holder, heard("tables.busy") as busy:
            holder.execute("lock table jobs_lib.jobs_lib_version in share mode")
            migrating.start()
            # More often than the driver waits before it prepares a statement.
            wait_for(lambda: len(busy) > 8, what="it has tried again and again")
        migrating.join(30)
        assert_unspoilt(empty_url, bounced)
    assert check_version(Database(empty_url)) == known_versions()[-1]


def test_migrations_use_the_direct_url_past_the_pooler(empty_url, migrate):
    nobody = f"postgresql://127.0.0.1:{free_port()}/nobody"
    migrate(database_url=nobody, pgbouncer="true", direct_url=empty_url)
    assert check_version(Database(empty_url)) == known_versions()[-1]


@needs_pgbouncer
@pytest.mark.guarantee("J21")
@pytest.mark.usefixtures("unspoilt")
def test_a_spark_task_loads_its_ranges_behind_pgbouncer(url, bounced, admin):
    app = make_app(bounced, pgbouncer=True)
    app.entity(app.topic("items", value=Item), source="items", key="id")(
        lambda connection, keys: {}
    )
    admin.execute("create table items (id int primary key, name text, version bigint)")
    admin.execute("insert into items select g, 'n', 1 from generate_series(1, 900) g")
    database = app.database()
    begun = reexport.begin(database, app.entities["items"], rate=6_000, ranges=30)
    # A worker of Spark calls this, with the objects that Spark has sent to it.
    load = make_task(Target.of(database), begun.loading, range(30))
    frame = pa.record_batch({"id": pa.array(range(30), pa.int64())})
    loaded = [row["keys"] for batch in load([frame]) for row in batch.to_pylist()]
    assert (len(loaded), sum(loaded)) == (30, 900)


@needs_pgbouncer
@pytest.mark.guarantee("J21")
def test_senders_that_hold_all_server_connections_wait_for_no_further_one(
    bounced, admin, bootstrap_servers, topic, wait_for, servers
):
    name = topic(1)
    app = make_app(bounced, pgbouncer=True, kafka_bootstrap_servers=bootstrap_servers)
    all_taken = threading.Barrier(servers)

    @app.entity(app.topic(name, value=Item), source="items", key="id")
    def load_items(connection, keys: list[str]) -> dict[str, Item]:
        if "meet" in keys:
            all_taken.wait(60)
        return {key: Item(1, key, 1) for key in keys}

    with heard("loop.failed") as failures, running(app, "relay"):
        # Each sender first loads a live state, and then wants records of the re-export.
        with admin.transaction():
            admin.execute(
                "insert into jobs_lib.reexports (entity, topic, rate, state, total)"
                " values ('items', %s, 60000, 'running', 8)",
                (name,),
            )
            admin.execute(
                "insert into jobs_lib.outbox (shard, class, topic, key, entity, cause,"
                " reexport_id) select n % 4, 1, topic, n, entity, 'reexport', id"
                " from jobs_lib.reexports, generate_series(0, 7) n",
            )
            admin.execute(
                "insert into jobs_lib.outbox (shard, topic, key, entity)"
                " select n, %s, 'meet', 'items' from generate_series(0, %s - 1) n",
                (name, servers),
            )
        wait_for(
            lambda: reexport.status(app.database(), "items").state == "finished",
            timeout=90,
            what="all records have left",
        )
    assert not all_taken.broken
    assert find_refused(failures) == []


@needs_pgbouncer
@pytest.mark.expects("origins.lost", "fenced")
@pytest.mark.guarantee("J21")
def test_relay_read_model_and_re_export_work_behind_pgbouncer(
    bounced, admin, bootstrap_servers, topic, tmp_path, wait_for
):
    name = topic(4, config={"cleanup.policy": "compact"})
    app = make_app(bounced, pgbouncer=True, kafka_bootstrap_servers=bootstrap_servers)
    items = app.topic(name, value=Item, compacted=True, partitions=4)

    declare_items(app, items, Item)

    for version in (1, 2):

        @app.read_model(
            name, table="model", key="id", group=f"{name}-model", version=version
        )
        def row(record):
            return {"name": record.value["name"]}

    columns = "(id int primary key, version bigint, name text)"
    admin.execute(f"create table model {columns}; create table model_v2 {columns}")
    admin.execute("create table items (id int primary key, name text, version bigint)")
    admin.execute("insert into items select g, 'old', 1 from generate_series(1, 400) g")

    def states(table: str) -> list[tuple[int, str, int]]:
        return admin.execute(
            f"select id, name, version from {table} order by id"
        ).fetchall()

    with heard("loop.failed", "record.failed") as failures, running(app):
        reexport.start(app.database(), app.entities["items"], rate=60_000)
        for n in range(1, 41):
            with app.transaction() as connection:
                connection.execute(
                    "update items set name = 'new', version = 2 where id = %s", (n,)
                )
                items.send(connection, key=str(n), value=Item(n, "new", 2), version=2)
        wait_for(
            lambda: states("model") == states("items"),
            timeout=60,
            what="the model equals the table",
        )
        admin.execute("update model set name = 'wrong' where id % 7 = 0")
        assert resync(app, "model") == (0, True)
        assert states("model") == states("items")
        assert {part.partition for part in list_read_models(app)} == {0, 1, 2, 3}
        assert switch(app, "model", 2).after == 2
        assert states("model") == states("model_v1") == states("items")
        database = app.database()
        source = TableSide.of(database, "items", "id", "version")
        write_keys(source, tmp_path / "keys")
        model = TableSide.of_model(database, app.consumers[0])
        assert verify(source, model) == verify(FileSide(tmp_path / "keys"), model) == []
        entity = app.entities["items"]
        admin.execute("delete from items where id > 390")
        reexport.remove_stale(database, app.settings, entity, rate=60_000)
        wait_for(
            lambda: len(states("model")) == 390,
            timeout=60,
            what="the stale keys are gone",
        )
        for _ in range(_TIMES):
            assert where(app, name, "40").verdict.endswith("with version 2.")
    assert find_refused(failures) == []
    del app.consumers[0]
    assert drop_version(app, "model", 1) == ["model_v1"]


@needs_pgbouncer
@pytest.mark.guarantee("J21")
@pytest.mark.usefixtures("unspoilt")
def test_all_kinds_of_consumers_work_behind_pgbouncer(
    bounced, admin, bootstrap_servers, topic, wait_for
):
    name = topic(2)
    app = make_app(
        bounced,
        pgbouncer=True,
        kafka_bootstrap_servers=bootstrap_servers,
        gate_refresh=0.05,
    )
    admin.execute("create table seen (who text, n int, unique (who, n))")
    admin.execute("create table waited (n int)")
    admin.execute("create table side (id text primary key, n int)")
    insert = "insert into seen values (%s, %s)"

    @app.consumer(name, group=f"{name}-plain")
    def handle(record, conn) -> None:
        conn.execute(insert, ("plain", record.value))

    @app.consumer(name, group=f"{name}-async")
    async def handle_async(record, conn) -> None:
        await conn.execute(insert, ("async", record.value))
        with contextlib.suppress(psycopg.errors.UniqueViolation):
            async with conn.transaction():
                await conn.execute(insert, ("async", record.value))

    @app.consumer(name, group=f"{name}-block", per="block")
    def handle_block(records, conn) -> None:
        with conn.cursor() as cursor:
            cursor.executemany(insert, [("block", one.value) for one in records])

    def tell(records, conn) -> None:
        for record in records:
            conn.execute(insert, ("told", record.value))

    @app.read_model(
        name, table="side", key="id", group=f"{name}-side", versions="side",
        on_change=tell,
    )  # fmt: skip
    def side(record):
        return {"n": record.value}

    @app.consumer(name, group=f"{name}-gated", after=[(name, f"{name}-side")])
    def handle_gated(record, conn) -> None:
        conn.execute("insert into waited values (%s)", (record.value,))

    wanted = [(who, n) for who in ("async", "block", "plain", "told") for n in range(9)]

    def read_seen():
        return admin.execute("select who, n from seen order by who, n").fetchall()

    with heard("loop.failed", "record.failed") as failures, running(app, "consumers"):
        # One after the other, so that each is a block.
        for n in range(9):
            produce(bootstrap_servers, name, [(f"k{n}", n)])
            wait_for(
                lambda n=n: read_seen() == [one for one in wanted if one[1] <= n],
                timeout=60,
                what=f"all have {n}",
            )
        wait_for(
            lambda: admin.execute("select from waited").rowcount == 9,
            timeout=60,
            what="the one that waits has all",
        )
    for _ in range(_TIMES):
        assert {part.state for part in list_gates(app)} == {"empty"}
    assert find_refused(failures) == []
    rows = admin.execute("select id, n from side order by id").fetchall()
    assert rows == [(f"k{n}", n) for n in range(9)]


@needs_pgbouncer
@pytest.mark.guarantee("J21")
@pytest.mark.usefixtures("unspoilt")
def test_a_stream_is_published_to_and_grows_behind_pgbouncer(
    bounced, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make_app(
        bounced,
        pgbouncer=True,
        publish_timeout=2,
        kafka_bootstrap_servers=bootstrap_servers,
    )
    stream = app.stream(name)
    seen: list[int] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        seen.append(record.value)

    with heard("loop.failed") as failures, running(app, "consumers"):
        for n in range(_TIMES):
            stream.publish("a", n, request=f"r{n}")
        # Meanwhile the process asks often whether it may publish.
        grow(app, name, 2)
        assert stream.publish("a", _TIMES).partition == choose_partition("a", 2)
        wait_for(lambda: len(seen) > _TIMES, timeout=60, what="all are handled")
    app.close()
    assert seen == [*range(_TIMES + 1)]
    assert find_refused(failures) == []


def test_all_settings_of_the_connection_count_wherever_the_database_is_opened(tmp_path):
    settings = load_settings(
        database_url="postgresql://a/b",
        direct_url="postgresql://c/d",
        pgbouncer=True,
        database_timeout=7,
        schema_name="mine",
    )
    database = Database.of(settings)
    assert (database.url, database.schema) == ("postgresql://a/b", "mine")
    assert (database.prepares, database.timeout, database.listens) == (False, 7, True)
    task = Target.of(database).database()
    assert (task.url, task.schema) == ("postgresql://a/b", "mine")
    assert (task.prepares, task.timeout) == (False, 7)


@needs_pgbouncer
@pytest.mark.expects("loop.failed", "fenced")
@pytest.mark.guarantee("U4", "FP10")
def test_the_first_error_of_an_executor_without_the_setting_names_it(
    bounced, run_process, wait_for
):
    worker = run_process("-m", "tests.faults.worker", bounced, "{}")

    def find_errors() -> list[str]:
        return [line for line in worker.errors if "Error" in line or "failed" in line]

    wait_for(find_errors, timeout=60, what=lambda: f"something fails\n{worker.output}")
    line = find_errors()[0]
    assert "prepared statement" in line
    assert "already exists" in line or "does not exist" in line
    assert "PgBouncer, seems to lie between" in line
    assert "set JOBS_LIB_PGBOUNCER=true" in line


@needs_pgbouncer
@pytest.mark.guarantee("U4")
@pytest.mark.parametrize("servers", [1])
def test_a_failed_enqueue_without_the_setting_names_it(bounced):
    one, other = make_app(bounced), make_app(bounced)
    for app in (one, other):
        app.job(name="notify")(lambda job: None)
    # Both prepare the statement in the same session of the server, by the same name.
    one.jobs["notify"].enqueue(one)
    with pytest.raises(
        ConfigurationError, match=r"prepared statement .*set JOBS_LIB_PGBOUNCER=true"
    ):
        other.jobs["notify"].enqueue(other)
    one.close()
    other.close()


@needs_pgbouncer
@pytest.mark.guarantee("J21", "W74")
@pytest.mark.usefixtures("unspoilt")
def test_read_models_answer_behind_pgbouncer(bounced, admin):
    app = make_app(bounced, pgbouncer=True)
    admin.execute("create table item_rm (id int primary key, version bigint)")
    app.read_model("items", table="item_rm", key="id", group="g", key_type=int)(
        lambda record: {}
    )
    items = app.answers("item_rm")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(items.wait_for, app, key=1, version=1, timeout=30)
        for version in range(_TIMES):
            assert items.put(app, key=2, version=version, entity={})
            assert items.newer(app) == [EntityState(2, version, {})]
            items.valid_since(app)
        assert not waiting.done()
        admin.execute("insert into item_rm values (1, 1)")
        assert waiting.result() is not None
    app.close()


@needs_pgbouncer
@pytest.mark.guarantee("J21", "T14")
@pytest.mark.usefixtures("unspoilt")
def test_streams_publish_behind_pgbouncer(bounced, bootstrap_servers, topic):
    app = make_app(bounced, pgbouncer=True, kafka_bootstrap_servers=bootstrap_servers)
    name = topic()
    stream = app.stream(name, check=lambda key, value, conn: conn.execute("select 1"))

    def publish(n: int) -> tuple[int, int | None]:
        answer = stream.publish("k", n % _TIMES, request=f"r{n % _TIMES}")
        return n % _TIMES, answer.offset

    with ThreadPoolExecutor(4) as threads:
        answers = {*threads.map(publish, range(3 * _TIMES))}
    events = read_topic(bootstrap_servers, name)
    assert answers == {(one.json, one.offset) for one in events}
    assert len(events) == _TIMES
    app.close()


@needs_pgbouncer
@pytest.mark.guarantee("U4")
@pytest.mark.parametrize("servers", [1])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_the_callers_statement_without_the_setting_names_it(
    bounced, is_async
):
    async def count_async(app):
        for _ in range(_TIMES):
            async with app.transaction() as connection:
                await connection.execute("select count(*) from pg_class")
        await app.aclose()

    def count(app):
        for _ in range(_TIMES):
            with app.transaction() as connection:
                connection.execute("select count(*) from pg_class")
        app.close()

    def ask(app):
        asyncio.run(count_async(app)) if is_async else count(app)

    # The driver of each prepares it in the same session of the server.
    ask(make_app(bounced))
    with pytest.raises(psycopg.Error, match="prepared statement") as caught:
        ask(make_app(bounced))
    assert caught.value.__notes__ == [POOLER]


@pytest.mark.parametrize(
    ("state", "text", "hints"),
    [
        ("42P05", 'prepared statement "_pg3_0" already exists', True),
        ("26000", 'prepared statement "jobs_lib_07" does not exist', True),
        ("42P05", 'prepared statement "mine" already exists', False),
        ("42P01", 'relation "_pg3_0" does not exist', False),
    ],
)
def test_only_lost_statements_of_the_driver_or_library_hint_at_a_pooler(
    state, text, hints
):
    assert hints_at_pooler(state, text) is hints


@needs_pgbouncer
@pytest.mark.parametrize("direct", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_executor_works_behind_pgbouncer(
    url, bounced, start_worker, wait_for, direct
):
    options = {"direct_url": url} if direct else {}
    worker = start_worker(
        bounced, pgbouncer=True, workers=4, async_workers=20, **options
    )
    for name in ("quick", "slow", "add", "aadd"):
        enqueue(bounced, name, 200)
    wait_for(
        lambda: count(url) == 0,
        timeout=30,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert effects(url) == sorted([*range(200)] * 2)
    assert attempts(url) == {("completed", 1)}
    assert "loop.failed" not in worker.output


@needs_pgbouncer
@pytest.mark.guarantee("J21", "FP10")
def test_enqueue_retry_groups_and_schedules_work_behind_pgbouncer(
    url, bounced, wait_for
):
    app = make_app(bounced, pgbouncer=True, workers=4)
    ran: list[tuple[str, int, int]] = []

    @app.job(group="group", retry=exponential(first=0.01, cap=0.01))
    def work(job, n: int, group: str) -> None:
        if n % 10 == 0 and job.attempt == 1:
            raise ValueError(n)
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s, 1)", (n, job.id))
        ran.append((group, n, job.attempt))

    @app.job()
    def alone(job) -> None:
        ran.append(("alone", 0, job.attempt))

    @app.job()
    def large(job, text: str) -> None:
        ran.append((f"large {len(text)}", 0, job.attempt))

    @app.periodic("* * * * * *")
    @app.job()
    def tick(job) -> None:
        ran.append(("tick", 0, job.attempt))

    with heard("loop.failed") as failures, running(app, "executor"):
        for start in range(0, 100, 20):
            with app.transaction() as connection:
                work.enqueue_many(
                    connection,
                    [{"n": n, "group": f"g{n % 5}"} for n in range(start, start + 20)],
                )
                alone.options(unique="alone").enqueue(connection)
        with psycopg.connect(bounced) as connection:
            large.enqueue(connection, text="x" * 20_000)
            later = work.enqueue(connection, n=101, group="g1")
        wait_for(lambda: len(effects(url)) == 101, timeout=30, what="all have run")
        for one in ("tick", "large 20000", "alone"):
            wait_for(
                lambda one=one: (one, 0, 1) in ran, timeout=30, what=f"{one} has run"
            )
    assert later
    for group in range(5):
        of_group = [n for g, n, _ in ran if g == f"g{group}"]
        assert of_group == sorted(of_group)
    assert {a for g, n, a in ran if g[0] == "g" and n % 10 == 0} == {2}
    assert failures == []


@needs_pgbouncer
def test_consumers_work_behind_pgbouncer(
    url, bounced, admin, bootstrap_servers, topic, wait_for
):
    name = topic(4)
    app = make_app(
        bounced,
        pgbouncer=True,
        home=name,
        kafka_bootstrap_servers=bootstrap_servers,
        consumer_block=20,
    )

    @app.job(group="key")
    def later(job, key: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s)", (n, job.id))

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        connection.execute("insert into calls values (%s, %s, 1)", (0, record.key))
        later.enqueue(connection, key=record.key, n=record.value)

    produce(bootstrap_servers, name, [(f"k{n % 20}", n) for n in range(400)])
    with heard("loop.failed", "record.failed") as failures, running(app):
        wait_for(lambda: len(effects(url)) >= 400, timeout=60, what="all have run")
    assert effects(url) == [*range(400)]
    assert count(url, "calls") == 400
    assert failures == []
