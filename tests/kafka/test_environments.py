"""Each environment has its own topics, and touches none of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.errors import ConfigurationError, OperatingError
from jobs_lib.kafka.shared_groups import find_shared
from jobs_lib.naming import name_in_kafka
from jobs_lib.operating.checks.consumers import check_shared
from jobs_lib.operating.checks.finding import Limits, Target
from jobs_lib.operating.switching import switch
from jobs_lib.operating.topics import apply_topics, plan_topics
from jobs_lib.operating.where import where
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.postgres.environment import COPIED
from jobs_lib.postgres.migrate import migrate
from jobs_lib.service.resync import resync
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings
from tests.support.apps import HOME, executing, make_app, running
from tests.support.records import produce, read_committed, read_topic
from tests.support.topics import create_topic

if TYPE_CHECKING:
    from jobs_lib import App
    from jobs_lib.operating.checks.finding import Finding

ENVIRONMENTS = ["dev", "staging", "prod"]


@pytest.fixture
def make_of(database_url, bootstrap_servers):
    """A function that makes an app of an environment."""

    def make(environment: str, **settings):
        return make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            environment=environment,
            environments=ENVIRONMENTS,
            **settings,
        )

    return make


def adopt(app, **options) -> None:
    migrate(app.settings.database_url, settings=app.settings, **options)


@pytest.mark.guarantee("W46")
def test_topics_and_groups_are_the_environments_own(
    make_of, connect, admin, kafka_admin, bootstrap_servers, wait_for, topic
):
    app = make_of("dev")
    adopt(app)
    # This topic is for this test alone: topics of the fixture `topic` have no prefix.
    bare = topic()
    name = f"dev.{bare}"
    states = app.topic(bare, value=int, compacted=True)
    seen = []

    @app.entity(states, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 4)

    @app.consumer(bare, group=f"{bare}-readers", value=int)
    def read(record, connection) -> None:
        seen.append((record.topic, record.key, record.value))

    admin.execute("create table things (id text)")
    capture_changes(admin, "things", topic=bare, key="id")
    assert {change.topic for change in apply_topics(app)} == {name}
    # A broker shows a new topic some time after it has made it.
    wait_for(lambda: plan_topics(app) == [], timeout=60, what="Kafka names it")
    try:
        with connect() as connection:
            states.send(connection, key="python", value=1)
            states.send_current(connection, key="current")
            connection.execute("select jobs_lib.send(%s, 'sql', '2')", (bare,))
            connection.execute("insert into things values ('captured')")
        with running(app, "consumers", "relay"):
            wait_for(lambda: len(seen) == 4, timeout=30, what="all are read")
        assert sorted(seen) == [
            (name, "captured", 4),
            (name, "current", 4),
            (name, "python", 1),
            (name, "sql", 2),
        ]
        groups = {
            one.group_id for one in kafka_admin.list_consumer_groups().result().valid
        }
        assert f"dev.{bare}-readers" in groups
        assert f"{bare}-readers" not in groups
        assert read_topic(bootstrap_servers, bare) == []
    finally:
        kafka_admin.delete_topics([name])[name].result()


@pytest.mark.guarantee("W46")
@pytest.mark.expects("origins.lost", "fenced")
def test_a_read_model_is_resynchronised_switched_and_asked_in_its_environment(
    make_of, admin, kafka_admin, bootstrap_servers, wait_for, topic
):
    app = make_of("dev", heartbeat_interval=0.5)
    adopt(app)
    bare = topic()
    name = f"dev.{bare}"
    create_topic(kafka_admin, name, 2, {"cleanup.policy": "compact"})
    admin.execute("create table state (id text primary key, version bigint, n int)")
    admin.execute("create table state_v2 (like state including all)")
    for version in (1, 2):

        @app.read_model(bare, table="state", key="id", group=bare, version=version)
        def row(record):
            return {"n": record.value}

    def read(table: str) -> dict[str, int]:
        return dict(admin.execute(f"select id, n from {table}").fetchall())

    states = {f"k{n}": n for n in range(10)}
    produce(bootstrap_servers, name, [*states.items()], headers={"ce_version": "1"})
    try:
        with running(app, "consumers") as service:
            wait_for(lambda: read("state") == states, timeout=60, what="it is filled")
            wait_for(lambda: service.is_ready, timeout=30, what="it is ready")
            admin.execute("update state set n = -1; insert into state values ('x', 1)")
            assert resync(app, "state") == (1, True)
            assert read("state") == states
            wait_for(lambda: read("state_v2") == states, timeout=60, what="the other")
            wait_for(
                lambda: switch_when_filled(app) is not None, timeout=60, what="switched"
            )
            assert read("state") == states
            assert where(app, bare, "k3").has_arrived
    finally:
        kafka_admin.delete_topics([name])[name].result()


def switch_when_filled(app):
    """Switch to the second version; None while it lacks records."""
    try:
        return switch(app, "state", 2)
    except OperatingError:
        return None


@pytest.mark.guarantee("W46", "W51")
@pytest.mark.parametrize("declared", ["topic", "consumer", "group", "home"])
def test_a_start_with_another_environments_topic_is_refused(make_of, declared):
    app = make_of("dev", **({"home": "prod.things"} if declared == "home" else {}))
    adopt(app)
    if declared == "topic":
        app.topic("prod.things")
    elif declared != "home":
        names = ("prod.things", "g") if declared == "consumer" else ("t", "prod.things")

        @app.consumer(names[0], group=names[1])
        def read(record, connection) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"'prod.things'.*'prod', and this is 'dev'.*'things'"
    ):
        Service(app).start()


@pytest.mark.guarantee("W46")
def test_a_database_of_another_environment_is_refused(make_of, connect):
    prod = make_of("prod")
    things = prod.topic("things")
    with pytest.raises(
        ConfigurationError, match=r"no environment yet.*jobs-lib migrate"
    ):
        Service(prod).start()
    adopt(prod)
    with connect() as connection:
        things.send(connection, key="a", value=1)
    for other in ("dev", ""):
        app = make_of(other)
        with pytest.raises(ConfigurationError, match="environment 'prod'"):
            Service(app).start()
        with pytest.raises(ConfigurationError, match="environment 'prod'"):
            adopt(app)
        with (
            connect() as connection,
            pytest.raises(ConfigurationError, match="environment 'prod'"),
        ):
            app.topic("things").send(connection, key="a", value=1)


def test_a_copied_database_becomes_another_environments_and_loses_waiting_rows(
    make_of, connect, admin
):
    prod = make_of("prod")
    adopt(prod)
    things, ran = prod.topic("things"), []

    @prod.job()
    def work(job) -> None:
        ran.append(job.id)

    with connect() as connection:
        things.send(connection, key="a", value=1)
        work.enqueue(connection)
    before = admin.execute("select id from jobs_lib.installation").fetchone()
    dev = make_of("dev")
    with pytest.raises(ConfigurationError, match="not to 'staging'"):
        adopt(dev, copied_from="staging")
    adopt(dev, copied_from="prod")
    assert admin.execute("select id from jobs_lib.installation").fetchone() != before
    assert admin.execute("select topic, home from jobs_lib.topics").fetchall() == [
        ("local", True)
    ]
    for table in ("jobs", "outbox"):
        assert admin.execute(f"select count(*) from jobs_lib.{table}").fetchone() == (
            0,
        )

    @dev.job(name="work")
    def work_here(job) -> None:
        ran.append(job.id)

    with executing(dev, HOME), connect() as connection:
        dev.topic("things").send(connection, key="a", value=1)
    assert admin.execute("select topic from jobs_lib.outbox").fetchall() == [
        ("dev.things",)
    ]
    assert ran == []


@pytest.mark.guarantee("W46")
def test_nothing_that_the_original_does_is_left_in_a_copy(make_of, admin):
    prod = make_of("prod")
    adopt(prod)
    admin.execute(
        "insert into jobs_lib.resyncs (model, topic, consumer_group, begins, notes)"
        " values ('stock', 'prod.stock', 'prod.g', 'start', 3)"
    )
    admin.execute(
        "insert into jobs_lib.resync_noted"
        " values ('stock', '{1}', '{null}', '{null}', '{null}')"
    )
    admin.execute("insert into jobs_lib.cancellations (id, origin) values (1, 'o')")
    admin.execute("insert into jobs_lib.streams values ('prod.tenants', 1)")
    adopt(make_of("dev"), copied_from="prod")
    tables = admin.execute(
        "select relname from pg_class where relkind in ('r', 'p')"
        " and not relispartition and relnamespace = 'jobs_lib'::regnamespace"
    ).fetchall()
    full = {
        table
        for (table,) in tables
        if admin.execute(f"select exists (select from jobs_lib.{table})").fetchone()[0]
    }
    # What the tables are, and the one topic that each database has.
    assert full == {"jobs_lib_version", "installation", "topics", "resumes"}
    # A copy keeps what was done, what is known, and what an operator has set.
    kept = {"apps", "history", "model_keys", "read_models", "pauses", "rates"}
    assert {table for (table,) in tables} == {*full, *kept, "grantees", *COPIED}


@pytest.mark.guarantee("W51")
def test_a_service_does_not_join_a_group_that_reads_for_another_database(
    jobs_databases, bootstrap_servers, topic, wait_for
):
    name = topic(2)
    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(20)])

    def committed() -> dict[int, int]:
        return read_committed(bootstrap_servers, f"{name}-readers", name) or {}

    with jobs_databases.fresh() as one, jobs_databases.fresh() as other:
        with psycopg.connect(other) as connection:
            # Both databases are copies of one template.
            connection.execute(
                "update jobs_lib.installation set id = gen_random_uuid()"
            )
        first, seen = make_reader(one, bootstrap_servers, name, "pod-1")
        second, seen_by_second = make_reader(other, bootstrap_servers, name, "pod-2")
        named = f"topic '{name}' in the group '{name}-readers', as "
        with running(first, "consumers"):
            wait_for(
                lambda: sum(committed().values()) >= 20, timeout=60, what="all is read"
            )
            before = committed()
            with pytest.raises(
                ConfigurationError,
                match=rf"{named}pod-1 at [\d.]+: .*JOBS_LIB_ENVIRONMENT.*another group",
            ):
                Service(second, ["consumers"]).start()
            assert all(at >= before[number] for number, at in committed().items())
            assert check_groups(first) == []
            # Offsets of a database before may stand until all partitions are taken.
            read = {f"{name}-readers": [name]}
            shared = find_shared(first.settings, uuid4(), read, lambda: {"pod-1"})
            assert [*shared] == []
        with running(second, "consumers"):
            wait_for(lambda: len(seen_by_second) == 20, timeout=60, what="it reads")
            (found,) = wait_for(
                lambda: check_groups(first), timeout=60, what="the check names it"
            )
            assert found.what.startswith(
                f"the service of another database reads the {named}pod-2"
            )
    assert sorted(seen) == sorted(seen_by_second)


def make_reader(
    url: str, bootstrap_servers: str, topic: str, pod: str
) -> tuple[App, list[str]]:
    """Make an app that notes the keys of a topic's records."""
    app = make_app(url, kafka_bootstrap_servers=bootstrap_servers, pod=pod)
    seen: list[str] = []

    @app.consumer(topic, group=f"{topic}-readers")
    def read(record, connection) -> None:
        seen.append(record.key)

    return app, seen


def check_groups(app: App) -> list[Finding]:
    database = app.database()
    with database.connect("check") as connection:
        target = Target(connection, database, app.settings, Limits(), None)
        return [*check_shared(target)]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{environment}.{name}", "dev.things"),
        ("{name}-{environment}", "things-dev"),
        ("x{name}.{environment}.y", "xthings.dev.y"),
    ],
)
def test_a_template_says_where_the_environment_stands(template, name):
    settings = load_settings(
        environment="dev", environments=["dev", "prod"], topic_template=template
    )
    assert name_in_kafka(settings, "things") == name
    with pytest.raises(ConfigurationError, match="declare it as 'things'"):
        name_in_kafka(settings, name)


@pytest.mark.parametrize(
    "given",
    [
        {"topic_template": "{name}"},
        {"topic_template": "{environment}.{environment}.{name}"},
        {"topic_template": "{environment} {name}"},
        {"topic_template": "{environment}.{name}.{other}"},
        {"environment": "de.v"},
        # `eu-things` of prod and `things` of prod-eu; likewise `things-prod` of eu.
        {
            "environment": "prod",
            "environments": ["prod", "prod-eu"],
            "topic_template": "{environment}-{name}",
        },
        {
            "environment": "eu",
            "environments": ["eu", "prod-eu"],
            "topic_template": "x-{name}-{environment}",
        },
        # A process without an environment keeps away from those that it knows.
        {"environments": ["a", "ab"], "topic_template": "{environment}{name}"},
    ],
)
def test_a_template_that_cannot_tell_environments_apart_is_refused(given):
    with pytest.raises(ConfigurationError, match=r"topic_template|environment"):
        load_settings(**given)
