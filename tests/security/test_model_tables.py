"""The tables of read models: only the consumer's role writes them."""

from __future__ import annotations

import io
import shlex
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from jobs_lib import create_read_model
from jobs_lib.cli.main import cli
from jobs_lib.errors import ConfigurationError
from jobs_lib.operating import apply_grants, check
from jobs_lib.postgres.database import Database
from jobs_lib.service.preparation import check_model_tables
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings
from tests.support.apps import make_app, running
from tests.support.engines import sqlalchemy_url
from tests.support.records import produce

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import App

DENIED = psycopg.errors.InsufficientPrivilege
# A text with what looks like a parameter to some drivers.
COLUMNS = {"airport": "text default 'a :b %s {c}' check (airport ~ '[[:alpha:]]')"}
WRITES = [
    "insert into board.aircraft_rm (tail) values ('N2')",
    "update board.aircraft_rm set version = 2",
    "delete from board.aircraft_rm",
    "insert into board.aircraft_rm values ('N1') on conflict do nothing",
]
DROP_KEY = "alter table board.aircraft_rm drop constraint aircraft_rm_pkey"


class Cast:
    """Roles: the owner runs migrations, the consumer writes, the web server reads."""

    def __init__(self, url: str, admin: psycopg.Connection[Any]) -> None:
        self._url = url
        self._admin = admin
        self._made: list[str] = []
        self.owner, self.consumer, self.web = map(
            self.add, ("owner", "consumer", "web")
        )

    def add(self, name: str) -> str:
        """Make a role."""
        role = f"{name}_{uuid4().hex[:8]}"
        self._admin.execute(f"create role {role} login password '{role}'")
        self._made.append(role)
        return role

    def url_of(self, role: str) -> str:
        """The URL of the database for a role."""
        url = make_url(self._url).set(username=role, password=role)
        return url.render_as_string(hide_password=False)

    def connect(self, role: str) -> psycopg.Connection[Any]:
        """Connect as a role."""
        return psycopg.connect(self.url_of(role), autocommit=True)

    def drop(self) -> None:
        """Drop all roles and what they own."""
        for role in self._made:
            self._admin.execute(f"drop owned by {role} cascade")
        for role in self._made:
            self._admin.execute(f"drop role {role}")


@pytest.fixture
def cast(jobs_database_url, admin):
    """The roles; each new table of the owner is granted to the web server's."""
    roles = Cast(jobs_database_url, admin)
    admin.execute(f"create schema board authorization {roles.owner}")
    with roles.connect(roles.owner) as connection:
        connection.execute(
            f"grant usage on schema board to {roles.consumer}, {roles.web}"
        )
        for whom in (roles.web, "public"):
            connection.execute(
                "alter default privileges in schema board grant all on tables to "
                + whom
            )
    yield roles
    roles.drop()


def by_connection(cast: Cast, url: str, **given: Any) -> None:
    with psycopg.connect(url) as connection:
        create_read_model(connection, "board.aircraft_rm", **given)


def by_alembic(cast: Cast, url: str, **given: Any) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        create_read_model(op, "board.aircraft_rm", **given)
    engine.dispose()


def by_sql_of_alembic(cast: Cast, url: str, **given: Any) -> None:
    printed = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql",
        # As in the `env.py` that `alembic init` writes.
        dialect_opts={"paramstyle": "named"},
        opts={"as_sql": True, "output_buffer": printed},
    )
    create_read_model(Operations(context), "board.aircraft_rm", **given)
    with psycopg.connect(url) as connection:
        connection.execute(printed.getvalue().encode())


def by_command(cast: Cast, url: str, **given: Any) -> None:
    words = ["readmodel", "create", "board.aircraft_rm", "--key", given["key"]]
    for name, definition in given["columns"].items():
        words += ["--column", f"{name}={definition}"]
    if "writer" in given:
        words += ["--writer", given["writer"]]
    for reader in given.get("readers", ()):
        words += ["--reader", reader]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(result.output.encode())


def create(cast: Cast, way: Callable[..., None] = by_connection, **given: Any) -> None:
    """Make the table as the owner."""
    url = cast.url_of(cast.owner)
    way(cast, url, **{"key": "tail", "columns": COLUMNS, **given})


@pytest.mark.guarantee("W53")
@pytest.mark.parametrize(
    "way", [by_connection, by_alembic, by_sql_of_alembic, by_command]
)
def test_only_the_consumers_role_writes_the_table_and_others_read_it(cast, admin, way):
    create(cast, way, writer=cast.consumer, readers=[cast.web])
    with cast.connect(cast.consumer) as consumer:
        for statement in WRITES:
            consumer.execute(statement)
    read = "select tail, version, airport from board.aircraft_rm"
    for role in (cast.web, cast.owner):
        with cast.connect(role) as connection:
            assert connection.execute(read).fetchall() == [("N1", None, "a :b %s {c}")]
            for statement in [*WRITES, "truncate board.aircraft_rm"]:
                with pytest.raises(DENIED):
                    connection.execute(statement)
    with cast.connect(cast.add("stranger")) as connection, pytest.raises(DENIED):
        connection.execute(read)
    rows = admin.execute(
        "select reloptions, (select format_type(atttypid, null) from pg_attribute"
        " where attrelid = c.oid and attname = 'version') from pg_class c"
        " where oid = 'board.aircraft_rm'::regclass"
    ).fetchall()
    assert rows == [(["fillfactor=80"], "bigint")]


@pytest.mark.guarantee("W53")
def test_without_a_writer_the_owner_alone_writes_and_everybody_may_be_let_read(cast):
    create(cast, readers=["public"], key="Tail number", key_sql_type="int")
    with cast.connect(cast.owner) as connection:
        connection.execute(
            'insert into board.aircraft_rm ("Tail number", version) values (7, 1)'
        )
    with cast.connect(cast.web) as connection:
        connection.execute("select from board.aircraft_rm")
        with pytest.raises(DENIED):
            connection.execute(WRITES[1])


def test_the_owner_may_be_the_writer(cast):
    create(cast, writer=cast.owner)
    with cast.connect(cast.owner) as connection:
        connection.execute(WRITES[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"table": "aircraft"},
            "'aircraft' needs the suffix _rm.*call it 'aircraft_rm'",
        ),
        ({"table": "a.b.c_rm"}, r"'a\.b\.c_rm' is no name .* 'board\.aircraft_rm'"),
        ({"table": ""}, "'' is no name"),
        ({"table": "x" * 61 + "_rm"}, "is no name"),
        ({"table": 7}, "7 is no name"),
        ({"key": ""}, "'' is no name for a column"),
        ({"key": "version"}, "has a column version of its own"),
        ({"key": "airport"}, "names its key 'airport' among its columns"),
        ({"key_sql_type": " "}, "type of the column 'tail' .* is ' '"),
        ({"columns": ["airport"]}, "give a mapping from names to types"),
        ({"columns": {"version": "int"}}, "has a column version of its own"),
        ({"columns": {"a": None}}, "type of the column 'a' .* is None"),
        ({"columns": {"a\0": "int"}}, "is no name for a column"),
        ({"writer": "public"}, "writer .* is 'public': give the one role"),
        ({"writer": ""}, "writer .* is ''"),
        ({"readers": "web"}, r"readers .* are 'web': give a list"),
        ({"readers": None}, "readers .* are None"),
        ({"readers": [""]}, "readers .* are"),
        ({"fillfactor": 9}, "fillfactor .* is 9: give percent, 10 to 100"),
        ({"fillfactor": 101}, "is 101"),
        ({"fillfactor": True}, "is True"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_table_is_refused_before_any_sql(given, said):
    ran: list[str] = []

    class Recorder:
        def execute(self, statement: str) -> None:
            ran.append(statement)

    usual: dict[str, Any] = {"table": "aircraft_rm", "key": "tail", "columns": COLUMNS}
    with pytest.raises(ConfigurationError, match=said):
        create_read_model(Recorder(), **{**usual, **given})
    assert not ran


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("aircraft --key tail", "needs the suffix _rm"),
        ("a_rm --key tail --column seats", "'seats' has no type"),
        ("a_rm --key tail --column s=int --column s=text", "'s' is given twice"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(words, said):
    result = CliRunner().invoke(cli, ["readmodel", "create", *shlex.split(words)])
    assert said in str(result.exception)
    assert "create table" not in result.output


def declare(cast: Cast, role: str, topic: str = "states", **settings: Any):
    """An app with a read model of the table, which connects as a role."""
    app = make_app(cast.url_of(role), **settings)

    @app.read_model(topic, table="board.aircraft_rm", key="tail", group="board")
    def row(record):
        return {"airport": record.value}

    return app


def refusal(cast: Cast, role: str) -> str:
    """Why a service of this role does not start."""
    with pytest.raises(ConfigurationError) as caught:
        Service(declare(cast, role), ["consumers"]).start()
    return str(caught.value)


def accept(app: App) -> None:
    """Check the tables as a service does when it starts."""
    check_model_tables(app.database(), app, ["consumers"])


def findings(cast: Cast, role: str | None = None) -> list[tuple[str, str, str]]:
    """The faults that the check finds in read models, as a superuser."""
    found = check(Database(cast._url), load_settings(), role=role)
    return [
        (one.level, one.what, one.way_out)
        for one in found
        if one.check == "read models" and one.level != "ok"
    ]


@pytest.fixture
def separate(cast):
    """The same roles; the consumer's has the rights of a service."""
    apply_grants(Database(cast._url), "service", cast.consumer)
    return cast


@pytest.mark.guarantee("W53")
def test_a_consumer_with_its_own_role_fills_the_table(
    separate, admin, bootstrap_servers, topic, wait_for
):
    create(separate, writer=separate.consumer, readers=[separate.web])
    name = topic(2)
    app = declare(
        separate, separate.consumer, name, kafka_bootstrap_servers=bootstrap_servers
    )
    records = [(f"N{n}", f"JFK{n}") for n in range(20)]
    produce(bootstrap_servers, name, records)
    with running(app, "consumers"), separate.connect(separate.web) as web:
        wait_for(
            lambda: (
                web.execute(
                    "select tail, airport from board.aircraft_rm order by version, tail"
                ).rowcount
                == 20
            ),
            timeout=30,
            what="the reader sees every row",
        )
    assert findings(separate) == findings(separate, separate.consumer) == []


@pytest.mark.guarantee("W53")
@pytest.mark.parametrize(
    ("grant", "named"),
    [
        ("grant insert on board.aircraft_rm to {web}", "{web}"),
        ("grant update (airport) on board.aircraft_rm to {web}", "{web}"),
        ("grant trigger on board.aircraft_rm to {web}", "{web}"),
        ("grant delete on board.aircraft_rm to public", "public"),
    ],
)
def test_a_right_of_another_role_to_write_is_refused_and_taken_by_the_way_out(
    separate, admin, grant, named
):
    create(separate, writer=separate.consumer, readers=[separate.web])
    roles = {"web": separate.web}
    admin.execute(grant.format(**roles))
    name = named.format(**roles)
    said = f"may write the read model's table board.aircraft_rm: {name}"
    way_out = (
        "revoke insert, update, delete, truncate, trigger on table "
        f'"board"."aircraft_rm" from {name}'
    )
    assert refusal(separate, separate.consumer).endswith(f"{said}: {way_out}")
    (found,) = findings(separate, separate.consumer)
    assert found[0] == "error"
    assert found[1].endswith(said)
    assert found[2] == way_out
    assert any(said in what or name in what for _, what, _ in findings(separate))
    admin.execute(way_out)
    assert findings(separate, separate.consumer) == findings(separate) == []


@pytest.mark.guarantee("W53")
def test_an_application_that_writes_by_a_group_or_as_the_owner_is_named(
    separate, admin
):
    create(separate, writer=separate.consumer)
    apply_grants(Database(separate._url), "enqueue", separate.web)
    admin.execute(f"grant {separate.consumer} to {separate.web}")
    said = refusal(separate, separate.consumer)
    assert f"aircraft_rm: {separate.web}: take {separate.web} out of the roles" in said
    (found,) = findings(separate)
    assert found[0] == "error"
    assert separate.consumer not in found[2]
    admin.execute(f"revoke {separate.consumer} from {separate.web}")
    assert findings(separate) == []
    admin.execute(f"alter table board.aircraft_rm owner to {separate.web}")
    assert findings(separate) == []
    admin.execute(f"grant update on board.aircraft_rm to {separate.web}")
    assert "let another role own it" in refusal(separate, separate.consumer)


def test_a_group_of_the_consumers_role_may_be_the_writer(separate, admin):
    group = separate.add("group")
    create(separate, writer=group)
    admin.execute(f"grant {group} to {separate.consumer}")
    assert findings(separate, separate.consumer) == findings(separate) == []
    accept(declare(separate, separate.consumer))


@pytest.mark.guarantee("W53")
def test_where_the_consumer_owns_the_table_other_writers_are_a_warning(
    separate, admin, caplog
):
    apply_grants(Database(separate._url), "service", separate.owner)
    create(separate)
    (found,) = findings(separate)
    assert found[0] == "warn"
    assert f"{separate.owner} owns the read model's table board.aircraft_rm" in found[1]
    admin.execute(f"grant insert on board.aircraft_rm to {separate.web}")
    accept(declare(separate, separate.owner))
    assert f"may write the read model's table board.aircraft_rm: {separate.web}" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("spoil", "said", "is_marked"),
    [
        ("drop table board.aircraft_rm", "is not in this database", False),
        ("alter table board.aircraft_rm drop tail", "no column tail for", True),
        (
            DROP_KEY,
            'not unique: alter table "board"."aircraft_rm" add primary key ("tail")',
            True,
        ),
        (
            f"{DROP_KEY}, add primary key (tail, airport)",
            "may hold a key twice",
            True,
        ),
        (
            "alter table board.aircraft_rm drop version",
            'no column version: alter table "board"."aircraft_rm" add column',
            True,
        ),
        (
            "alter table board.aircraft_rm alter version type int",
            "version of the read model's table board.aircraft_rm is of type integer",
            True,
        ),
        (
            "revoke insert, delete on board.aircraft_rm from {consumer}",
            "lacks insert, delete for the read model's table board.aircraft_rm",
            False,
        ),
        (
            "revoke usage on schema board from {consumer}",
            "lacks usage on its schema for the read model's table",
            False,
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused_at_the_start(
    separate, admin, spoil, said, is_marked
):
    create(separate, writer=separate.consumer)
    admin.execute(spoil.format(consumer=separate.consumer))
    line = refusal(separate, separate.consumer)
    assert said in line
    assert "\n" not in line
    found = [f"{what}: {way_out}" for _, what, way_out in findings(separate)]
    assert any(said in one for one in found) is is_marked


def test_a_table_in_the_search_path_is_found_without_its_schema(separate, admin):
    create(separate, writer=separate.consumer)
    app = make_app(separate.url_of(separate.consumer))
    app.read_model("states", table="aircraft_rm", key="tail", group="board")(
        lambda record: {}
    )
    with pytest.raises(ConfigurationError, match=r"table aircraft_rm .* not in"):
        Service(app, ["consumers"]).start()
    for role in (separate.consumer, separate.owner):
        admin.execute(
            sql.SQL("alter role {} set search_path = board, public").format(
                sql.Identifier(role)
            )
        )
    accept(app)
