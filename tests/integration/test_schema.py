"""The migrations run beside others, in any schema, and several at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import MetaData, create_engine, text

from jobs_lib.cli.main import cli
from jobs_lib.errors import (
    ConfigurationError,
    OperatingError,
    SchemaVersionError,
    UnavailableError,
)
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import (
    VERSION_TABLE,
    include_name,
    installed_version,
    migrate,
    upgrade,
    write_sql,
)
from jobs_lib.postgres.revisions import check_version, known_versions, migrations_path
from jobs_lib.settings import default_settings, load_settings
from tests.support.apps import executing, make_app
from tests.support.engines import sqlalchemy_url

if TYPE_CHECKING:
    from jobs_lib import Job


@pytest.mark.guarantee("FS1")
@pytest.mark.parametrize(
    "schema", ["jobs_lib", 'we"ird; Ünï', "x'y {schema}.\\back $$", "ü" * 31 + "x"]
)
def test_the_tables_live_in_a_schema_of_any_name(empty_url, schema, wait_for):
    migrate(empty_url, schema)
    migrate(empty_url, schema)
    app = make_app(empty_url, schema_name=schema)
    ran: list[int] = []

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        with job.transaction():
            ran.append(job.id)

    with psycopg.connect(empty_url) as connection:
        work.enqueue(connection, group="g")
        work.enqueue_many(connection, [{"group": "g"}, {"group": "h"}])
        app.topic("states").send(connection, key="a", value=1)
    with executing(app, [f"local/{n}" for n in range(16)]):
        wait_for(lambda: len(ran) == 3, what="all ran")


@pytest.mark.guarantee("FS1")
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("", "has 0 bytes"),
        ("ü" * 32, "has 64 bytes, and may have 1 to 63"),
        ("per%cent", "has '%' in it"),
        ("a:b", "has ':' in it"),
        ("new\nline", r"has '\\n' in it"),
        ("nul\0", r"has '\\x00' in it"),
        ("half\ud800", "control character"),
        ("a $do$ b", r"has '\$do\$' in it"),
        ("$function$", r"has '\$function\$' in it"),
        ("$user", "is taken"),
        ("pg_temp", "is taken"),
        ("public", "a schema of their own"),
    ],
)
def test_a_name_that_no_schema_of_ours_can_have_is_refused(
    schema, why, monkeypatch, postgres_server
):
    url = postgres_server.url
    ways = {
        "settings": lambda: load_settings(schema_name=schema),
        "migrate": lambda: migrate(url, schema),
        "write_sql": lambda: write_sql(schema),
        "Database": lambda: Database(url, schema),
    }
    for name, way in ways.items():
        with pytest.raises(ConfigurationError, match=why) as refused:
            way()
        assert "such as jobs_lib" in str(refused.value), name


@pytest.mark.parametrize(
    "form",
    [
        "postgresql://{login}@127.0.0.1:1,{host}:{port}/{dbname}",
        "postgresql:///{dbname}?host=127.0.0.1,{host}&port=1,{port}&{parameters}",
        "postgres://{login}@{host}:{port}/{dbname}?target_session_attrs=read-write",
        "postgresql+psycopg://{login}@{host}:{port}/{dbname}",
    ],
    ids=["hosts", "parameters", "attributes", "driver"],
)
def test_the_tables_are_installed_by_every_url_that_services_accept(
    empty_url, form, monkeypatch
):
    parts = conninfo_to_dict(empty_url)
    url = form.format(
        **parts,
        login=f"{parts['user']}:{parts['password']}",
        parameters=f"user={parts['user']}&password={parts['password']}",
    )
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", url)
    default_settings.cache_clear()
    done = CliRunner().invoke(cli, ["migrate"])
    assert done.exit_code == 0, (done.output, done.exception)
    command.upgrade(Config("alembic.ini"), "head")
    assert migrate(url) == known_versions()[-1]
    check_version(Database.of(load_settings()))


def test_several_pods_may_migrate_at_once(empty_url):
    failures: list[BaseException] = []

    def run():
        try:
            migrate(empty_url)
        except BaseException as error:
            failures.append(error)

    pods = [threading.Thread(target=run) for _ in range(3)]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join()
    assert failures == []
    engine = create_engine(sqlalchemy_url(empty_url))
    with engine.connect() as connection:
        assert installed_version(connection) == known_versions()[-1]
    engine.dispose()


def test_the_number_of_shards_is_chosen_once(empty_url):
    def read() -> tuple[int] | None:
        with psycopg.connect(empty_url) as connection:
            return connection.execute(
                "select shards from jobs_lib.installation"
            ).fetchone()

    for wrong in (0, 1_025):
        with pytest.raises(ConfigurationError, match=f"{wrong} shards"):
            migrate(empty_url, shards=wrong)
    migrate(empty_url, shards=1)
    assert read() == (1,)
    # Another pod, or a later release, leaves these values unchanged.
    migrate(empty_url, shards=1)
    migrate(empty_url)
    run = CliRunner(env={"JOBS_LIB_DATABASE_URL": empty_url}).invoke
    assert run(cli, ["migrate", "--shards", "1"]).exit_code == 0
    refused = run(cli, ["migrate", "--shards", "16"])
    assert isinstance(refused.exception, OperatingError)
    assert "has 1 shards, not 16" in str(refused.exception)
    engine = create_engine(sqlalchemy_url(empty_url))
    with (
        engine.connect() as connection,
        pytest.raises(OperatingError, match="fixed when the tables are installed"),
    ):
        upgrade(connection, shards=2)
    engine.dispose()
    assert read() == (1,)


def test_a_users_own_migration_can_call_ours_in_its_transaction(empty_url):
    engine = create_engine(sqlalchemy_url(empty_url))
    with engine.connect() as connection:
        connection.execute(text("create table mine (id int)"))
        upgrade(connection)
        # The caller's search path is unchanged: this table lands in public.
        connection.execute(text("create table also_mine (id int)"))
        assert installed_version(connection) == known_versions()[-1]
        connection.rollback()
        assert installed_version(connection) is None
        upgrade(connection, shards=3)
        connection.execute(text("create table also_mine (id int)"))
        connection.commit()
        shards = text("select shards from jobs_lib.installation")
        assert connection.execute(shards).scalar_one() == 3
        names = connection.execute(
            text("select schemaname || '.' || tablename from pg_tables")
        ).scalars()
        assert {"public.also_mine", f"jobs_lib.{VERSION_TABLE}"} <= set(names)
    engine.dispose()


def test_autogenerate_leaves_our_tables_alone(database_url):
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.connect() as connection:

        def drops(**options) -> list[object]:
            context = MigrationContext.configure(
                connection, opts={"include_schemas": True, **options}
            )
            return compare_metadata(context, MetaData())

        assert drops() != []
        assert drops(include_name=include_name()) == []
    engine.dispose()


@pytest.mark.guarantee("U4")
def test_missing_old_and_newer_tables_are_named_with_the_way_out(
    empty_url, database_url, connect
):
    with pytest.raises(SchemaVersionError, match="run `jobs-lib migrate`"):
        check_version(Database(empty_url))
    database = Database(database_url)
    check_version(database)
    admin = connect(autocommit=True)
    oldest, newest = "0001_installation", "9999_later"
    change = f"update jobs_lib.{VERSION_TABLE} set version_num = %s"
    admin.execute(change, (oldest,))
    told = rf"version {oldest}, .*run `jobs-lib migrate`"
    with pytest.raises(SchemaVersionError, match=told):
        check_version(database)
    admin.execute(change, (newest,))
    admin.execute("update jobs_lib.installation set compatible_from = '9998_before'")
    with pytest.raises(SchemaVersionError, match=rf"version {newest}.*newer"):
        check_version(database)


# Before the first release a version was only a number. One of these sorts below our
# versions, one above them, and Alembic takes one for the short form of one of ours.
# Later versions had a subject, too. Such a version is unknown and sorts below ours, or
# its tables serve a version that is unknown and sorts below ours.
@pytest.mark.parametrize(
    ("version", "serves"),
    [
        # The oldest of these versions had no such column.
        ("0001", None),
        ("0005", None),
        ("0034", None),
        ("0016_reexports", "0001_installation"),
        ("0032_truncate", "0017_consuming"),
        ("9998_other", "0017_other"),
    ],
)
@pytest.mark.guarantee("U4")
def test_tables_of_no_release_are_refused_by_every_way(
    database_url, connect, version, serves
):
    admin = connect(autocommit=True)
    admin.execute(f"update jobs_lib.{VERSION_TABLE} set version_num = %s", (version,))
    if serves is None:
        admin.execute("alter table jobs_lib.installation drop compatible_from")
    else:
        admin.execute(
            "update jobs_lib.installation set compatible_from = %s", (serves,)
        )
    engine = create_engine(sqlalchemy_url(database_url))

    def upgrade_mine() -> None:
        with engine.begin() as connection:
            upgrade(connection)

    def run_alembic() -> None:
        with engine.begin() as connection:
            config = Config("alembic.ini")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    ways = {
        "migrate": lambda: migrate(database_url),
        "upgrade": upgrade_mine,
        "alembic": run_alembic,
        "check": lambda: check_version(Database(database_url)),
    }
    for name, way in ways.items():
        with pytest.raises(
            SchemaVersionError,
            match=rf"have version {version}, which no release.*drop the schema",
        ):
            way()
        found = admin.execute(f"select version_num from jobs_lib.{VERSION_TABLE}")
        assert found.fetchone() == (version,), name
    engine.dispose()


def test_a_server_that_is_not_there_is_named_without_its_password():
    url = "postgresql://me:canary@127.0.0.1:1/orders"
    for ask in (lambda: migrate(url), lambda: Database(url).connect("test")):
        with pytest.raises(
            UnavailableError, match=r"me@127\.0\.0\.1:1/orders"
        ) as raised:
            ask()
        assert "canary" not in str(raised.value)
        assert raised.value.__cause__ is None


def test_the_tables_can_be_taken_away_again(empty_url):
    migrate(empty_url)
    engine = create_engine(sqlalchemy_url(empty_url))
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(migrations_path()))
        config.attributes |= {"connection": connection, "schema": "jobs_lib"}
        command.downgrade(config, "base")
    with engine.connect() as connection:
        names = connection.execute(
            text("select tablename from pg_tables where schemaname = 'jobs_lib'")
        ).scalars()
        assert list(names) == [VERSION_TABLE]
    engine.dispose()


@pytest.mark.parametrize("environment", ["dev", ""])
def test_the_tables_serve_the_environment_of_the_process(
    empty_url, environment, monkeypatch
):
    monkeypatch.setenv("JOBS_LIB_ENVIRONMENT", environment)
    default_settings.cache_clear()
    engine = create_engine(sqlalchemy_url(empty_url))
    with engine.begin() as connection:
        upgrade(connection)
        served = text("select environment from jobs_lib.installation")
        assert connection.execute(served).scalar_one() == environment
    engine.dispose()
