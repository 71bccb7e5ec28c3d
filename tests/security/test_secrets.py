"""No output of any kind contains a password."""

from __future__ import annotations

import json
import logging
import re
import signal
import traceback
from pathlib import Path
from urllib.parse import quote

import confluent_kafka
import psycopg
import pytest
import trustme

from jobs_lib import Discard, masking, operating
from jobs_lib.cli.main import cli
from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.masking import (
    describe,
    find_passwords,
    find_secrets,
    keep_secret,
    mask,
    masked_url,
)
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings
from tests import support
from tests.security.helpers import CANARY, User
from tests.support.apps import heard, make_app, running
from tests.support.command_line import leaves
from tests.support.records import produce

LETTER = "hunter2"
"""A text in every secret of these tests, however it is written."""
ESCAPED = quote(f"{LETTER} @/:?#%[]'\"", safe="")
APP = "tests.security.service:app"
COMMANDS = [
    *("migrate", "check", "owners", "grants read postgres"),
    "readmodel create aircraft_rm --key tail",
    *(f"readmodel {one}" for one in (f"status {APP}", f"replay {APP} guarded")),
    f"readmodel resync {APP} 1",
    f"readmodel verify {APP} 1",
    *("readmodel keys 1", f"readmodel switch {APP} 1 2", f"readmodel drop {APP} 1 2"),
    f"jobs enqueue work --app {APP}",
    *("jobs list", "jobs show 1", "jobs explain 1", "jobs cancel 1", "jobs pauses"),
    *("jobs pause type work", "jobs resume type work", "jobs retry --all"),
    *("jobs delete --type work", "jobs maintain"),
    *("outbox status", "outbox show 1", "outbox retry", "outbox drop 1 --yes"),
    *(f"topics {one} {APP}" for one in ("plan", "apply", "check", "plan")),
    *(f"schemas {one} {APP}" for one in ("check", "register")),
    *(
        f"topics declare {APP} guarded --home --partitions 1",
        f"topics repartition {APP} 1",
        f"topics grow {APP} guarded-events --partitions 4 --group guarded-g",
        f"topics status {APP}",
    ),
    *(f"reexport plan things --rate 60 --app {APP}", f"reexport list --app {APP}"),
    *(f"reexport start things --rate 60 --engine sql --app {APP}",),
    *(f"reexport watch-lag things off --app {APP}",),
    *(f"reexport {one} things --app {APP}" for one in ("status", "pause", "resume")),
    *(f"reexport rate things 90 --app {APP}", f"reexport cancel things --app {APP}"),
    f"reexport stale things --rate 60 --engine sql --app {APP}",
    f"reexport switch things 1 --app {APP}",
    f"reexport rebuild things --rate 60 --engine sql --yes --app {APP}",
    *(f"where {APP} guarded-states a", f"gates {APP}"),
    "reexport pack 1",
    *(
        f"coordination {one} --log guarded-log"
        for one in (
            *("create --partitions 2", "check", "show", "pause guarded.g --for 1h"),
            "set-position guarded.g guarded-states --to latest",
            *("resume guarded.g", "release guarded.g"),
        )
    ),
    *("dev up", "dev env", "dev status", "dev status --json", "dev down"),
]
AWAY = ("@nowhere.invalid/d", "@127.0.0.1:1/d")
"""The ends of URLs of servers that do not answer."""
SERVICES = [f"{one} {APP}" for one in ("run", "executor", "relay")]
"""The commands that run until they are stopped, unless they cannot start."""


@pytest.fixture(autouse=True)
def unmasked(monkeypatch):
    """Each test has its own secrets."""
    monkeypatch.setattr(masking, "_secrets", set())
    monkeypatch.setattr(masking, "_pattern", None)


@pytest.fixture
def run(run_process, tmp_path):
    """A function that runs commands in one process; it returns their output."""

    def run(commands: list[str], environment: dict[str, str]) -> str:
        (tmp_path / "empty.toml").touch()
        process = run_process(
            *("-m", "tests.security.commands", *commands),
            env={"JOBS_LIB_CONFIG_FILE": str(tmp_path / "empty.toml"), **environment},
        )
        process.wait(timeout=120)
        output: str = process.output
        for command in commands:
            assert f"{command}: exit" in output, output
        return output

    return run


@pytest.fixture
def kafka(secured) -> dict[str, str]:
    """Settings of Kafka with many secrets, and with all of librdkafka's logs."""
    leaf = trustme.CA().issue_cert("alice@example.com")
    return User("alice").kafka(secured) | {
        "ssl.certificate.pem": leaf.cert_chain_pems[0].bytes().decode(),
        "ssl.key.pem": leaf.private_key_pem.bytes().decode(),
        "ssl.key.password": LETTER,
        "debug": "all",
    }


def refuse(output: str, kafka: dict[str, str] | None = None) -> None:
    """Fail if the output contains a secret."""
    for line in output.splitlines():
        assert LETTER not in line
    for line in (kafka or {}).get("ssl.key.pem", "").splitlines()[1:-1]:
        assert line not in output


def test_every_command_is_tried_for_leaked_passwords():
    tried = [*COMMANDS, *SERVICES]
    for leaf in leaves(cli):
        assert any(one.startswith(leaf) for one in tried), leaf


@pytest.mark.guarantee("FS2")
def test_commands_that_succeed_show_no_password(
    run, secured, secured_admin, kafka, secret_url, admin, grant, tmp_path
):
    for kind, name in (("TOPIC", "guarded"), ("GROUP", "guarded")):
        grant("alice", kind, name, "ALL", prefixed=True)
    admin.execute("create table things (id text primary key)")
    admin.execute("insert into things values ('a')")
    folder = f"--folder {tmp_path}"
    commands = [
        f"{one} {folder}" if one.startswith("dev ") else one for one in COMMANDS
    ]
    output = run(
        commands,
        {
            "JOBS_LIB_DATABASE_URL": secret_url,
            "JOBS_LIB_DIRECT_URL": secret_url,
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": secured.address_of("SECURED"),
            "JOBS_LIB_KAFKA": json.dumps(kafka),
        },
    )
    made = ["guarded-states", "guarded-events", "guarded-log"]
    support.delete_topics(secured_admin, made)
    refuse(output, kafka)
    codes = dict(re.findall(r"^(.*): exit (\d)$", output, re.MULTILINE))
    # The exit code 1 reports that something is missing or wrong, and 2 an error.
    failed = {one for one in commands if codes[one] not in "01"}
    assert not {one for one in failed if "1" not in one.split()}, output


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://keeper:{LETTER}-wrong@127.0.0.1:{{port}}/{{dbname}}",
        f"postgresql://keeper:{ESCAPED}@127.0.0.1:{{port}}/{{dbname}}",
        f"postgresql://keeper@127.0.0.1:{{port}}/{{dbname}}?password={ESCAPED}",
        f"postgresql://keeper:{CANARY}@127.0.0.1:{{port}}/no-such-database",
        f"postgresql://keeper:{CANARY}@127.0.0.1:1/x",
    ],
    ids=["wrong", "escaped", "parameter", "database", "port"],
)
def test_a_database_that_cannot_be_used_is_named_without_the_password(
    url, secret_url, database_url, caplog
):
    parts = psycopg.conninfo.conninfo_to_dict(database_url)
    url = url.format(**parts)
    app = make_app(url, direct_url=url)
    database = app.database()
    with caplog.at_level(logging.DEBUG):
        for connect in (
            lambda: database.connect("test"),
            lambda: database.connect("test", direct=True),
            lambda: migrate(url),
        ):
            with pytest.raises(UnavailableError) as caught:
                connect()
            refuse("".join(traceback.format_exception(caught.value)))
    refuse(caplog.text)
    for thing in (app, database, app.settings, app.transaction()):
        refuse(f"{thing!r} {thing}")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://keeper:{LETTER}@{LETTER}@h/d",
        f"postgresql://keeper:x/{LETTER}@h/d",
        f"postgresql://keeper:{LETTER}/x@h/d",
        f"postgresql://keeper:{LETTER}%zz@h/d",
        f"postgresql://keeper:{LETTER} x@h/d",
        f"postgresql://keeper:{LETTER}@[::1/d",
        f"postgresql://keeper:{LETTER}@h:port/d",
        f"postgresql://keeper@h/d?pasword={LETTER}",
        f"postgresql://keeper@h/d?password={LETTER}%",
        f"keeper:{LETTER}@h/d",
        f"{LETTER}://h/d",
        f"host=h password={LETTER}",
    ],
)
@pytest.mark.parametrize("name", ["database_url", "direct_url"])
def test_a_url_that_cannot_be_read_is_refused_without_being_shown(name, url):
    with pytest.raises(ConfigurationError, match=name) as caught:
        load_settings(**{name: url})
    refuse(f"{caught.value!r}".replace(f"starts with '{LETTER}'", ""))


@pytest.mark.guarantee("FS2")
@pytest.mark.parametrize(
    "wrong",
    [
        {"JOBS_LIB_DATABASE_URL": f"postgresql://keeper:{LETTER}@{LETTER}@h/d"},
        pytest.param(
            {
                "JOBS_LIB_DATABASE_URL": f"postgresql://keeper:{LETTER}@nowhere.invalid/d"
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"JOBS_LIB_DATABASE_URL": f"postgresql://keeper:{LETTER}@127.0.0.1:1/d"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"sasl.password": LETTER}, marks=pytest.mark.slow),
        pytest.param({"sasl.pasword": LETTER}, marks=pytest.mark.slow),
        pytest.param({"security.protocol": LETTER}, marks=pytest.mark.slow),
        pytest.param({"ssl.key.pem": LETTER}, marks=pytest.mark.slow),
        pytest.param(
            {"JOBS_LIB_KAFKA": f'{{"sasl.password": "{LETTER}'}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        *("unreadable", "host", "port", "kafka-password", "kafka-key"),
        *("kafka-value", "kafka-pem", "kafka-json"),
    ],
)
@pytest.mark.expects("loop.failed")
def test_commands_that_fail_show_no_password(
    run, run_process, wait_for, secured, kafka, secret_url, wrong
):
    kafka |= {key: value for key, value in wrong.items() if "." in key}
    environment = {
        "JOBS_LIB_DATABASE_URL": secret_url,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": secured.address_of("SECURED"),
        "JOBS_LIB_KAFKA": json.dumps(kafka),
    } | {key: value for key, value in wrong.items() if "." not in key}
    commands = [one for one in COMMANDS if not one.startswith("dev ")]
    output = run(commands, environment)
    refuse(output, kafka)
    if environment["JOBS_LIB_DATABASE_URL"].endswith(AWAY):
        module = "tests.security.commands"
        services = [run_process("-m", module, one, env=environment) for one in SERVICES]
        for service in services:  # these wait for it
            wait_for(lambda s=service: "does not answer" in s.output, timeout=60)
            service.signal(signal.SIGTERM)
        for service in services:
            service.wait(timeout=60)
            refuse(service.output, kafka)
        return
    output = run(SERVICES, environment)
    refuse(output, kafka)
    codes = dict(re.findall(r"^(.*): exit (\d)$", output, re.MULTILINE))
    assert {codes[one] for one in SERVICES} == {"2"}, output


@pytest.mark.guarantee("FS2")
def test_errors_that_are_kept_or_emitted_have_no_password(
    secret_url, admin, connect, topic, bootstrap_servers, wait_for, caplog
):
    """The application's own errors may repeat a URL."""
    caplog.set_level(logging.DEBUG)
    read, written = topic(), topic()
    app = make_app(
        secret_url,
        home=read,
        kafka_bootstrap_servers=bootstrap_servers,
        kafka={"sasl.password": f"{LETTER}-of-kafka"},
    )
    states = app.topic(written, value=int, compacted=True)

    @app.entity(states, source="states", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        raise ValueError(f"cannot load from {secret_url}")

    @app.consumer(read, group=f"{read}-group")
    def handle(record, connection) -> None:
        raise ValueError(f"cannot handle {app.settings.kafka}")

    @app.job()
    def work(job) -> None:
        raise Discard(f"cannot use {secret_url}, {CANARY!r}")

    events = ("job.ran", "record.failed", "rows.held", "loop.failed", "jobs.discarded")
    produce(bootstrap_servers, read, [("a", 1)])
    with heard(*events) as told, running(app):
        with connect() as connection:
            job = work.enqueue(connection)
            states.send_current(connection, key="a")
        wait_for(
            lambda: {event for event, _ in told} >= {"record.failed", "rows.held"},
            timeout=40,
            what="the record and the row are reported",
        )
        wait_for(
            lambda: any(event == "job.ran" for event, _ in told),
            timeout=40,
            what="the job has run",
        )
        (hold,) = operating.list_holds(app.database())
    shown = f"{operating.show_job(app.database(), job)}"
    assert "***" in shown
    assert "***" in hold.error
    refuse(f"{told} {hold} {shown} {caplog.text}")
    for table in ("jobs", "discarded", "holds", "held_rows", "outbox"):
        rows = admin.execute(f"select t::text from jobs_lib.{table} t").fetchall()
        refuse(f"{rows}")


def test_a_secret_is_hidden_wherever_it_stands():
    keep_secret({"pass", "longer-pass", "one two", "abc", ""})
    assert mask("pass, pass! longer-pass=longer-pass;") == "***, ***! ***=***;"
    assert mask("xlonger-passx one two") == "x***x ***"
    # A short secret may be part of another word: it is hidden as a whole word only. A
    # still shorter one is not hidden at all.
    assert mask("password, bypass, abc") == "password, bypass, abc"
    assert describe(ValueError("no pass")) == "ValueError: no ***"


OPEN = {
    *("sasl.mechanism", "sasl.mechanisms", "sasl.username"),
    *("ssl.ca.certificate.stores", "ssl.ca.pem", "ssl.certificate.pem"),
    *("ssl.cipher.suites", "ssl.curves.list", "ssl.sigalgs.list", "https.ca.pem"),
    *("ssl.endpoint.identification.algorithm", "ssl.engine.id", "ssl.providers"),
    *("sasl.oauthbearer.client.id", "sasl.oauthbearer.client.credentials.client.id"),
    *("sasl.oauthbearer.extensions", "sasl.oauthbearer.scope"),
    *("sasl.oauthbearer.grant.type", "sasl.oauthbearer.method"),
    *("sasl.oauthbearer.metadata.authentication.type",),
    *("sasl.oauthbearer.sub.claim.name", "sasl.oauthbearer.token.endpoint.url"),
    "sasl.oauthbearer.assertion.algorithm",
}
"""Settings of Kafka's client that are no secrets, besides names of files."""


@pytest.mark.guarantee("FS2")
def test_each_setting_of_kafkas_client_is_a_secret_or_known_to_be_none():
    folder = Path(confluent_kafka.__file__).parents[1]
    libraries = [*folder.glob("confluent_kafka*libs/librdkafka*")]
    if not libraries:
        pytest.skip("the client's library does not lie beside it")
    found = re.findall(
        rb"\0((?:sasl|ssl|https)(?:\.[a-z]+)+)(?=\0)", libraries[0].read_bytes()
    )
    names = {name.decode() for name in found}
    assert {"sasl.password", "sasl.username", "ssl.key.pem"} <= names
    files = re.compile(r"\.(location|file|keytab)$|\.kerberos\.|\.claim\.")
    for name in names - OPEN:
        secret = find_secrets({name: CANARY}) == {CANARY}
        assert secret or files.search(name), name


@pytest.mark.guarantee("FS2")
@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("kafka", {"sasl.oauthbearer.assertion.private.key.pem": f"-----\n{CANARY}\n"}),
        ("kafka", {"sasl.oauthbearer.assertion.private.key.passphrase": CANARY}),
        ("kafka", {"sasl.oauthbearer.token.endpoint.url": f"https://u:{CANARY}@h/t"}),
        ("schema_registry", {"proxy": f"http://u:{CANARY}@h:1"}),
        ("schema_registry", {"bearer.auth.client.secret": CANARY}),
        ("schema_registry", {"bearer.auth.token": CANARY}),
        ("schema_registry", {"basic.auth.user.info": f"u:{CANARY}"}),
        ("schema_registry", {"ssl.key.password": CANARY}),
    ],
)
def test_a_secret_of_a_client_is_hidden(where, given):
    settings = load_settings(**{where: given})
    assert CANARY not in mask(f"it is {CANARY}")
    assert CANARY not in settings.model_dump_json()
    assert CANARY not in repr(settings)


def test_the_names_of_files_with_keys_are_no_secrets():
    assert not find_secrets(
        {
            "sasl.oauthbearer.assertion.private.key.file": "/etc/keys/key.pem",
            "ssl.key.location": "/etc/keys/key.pem",
            "sasl.oauthbearer.token.endpoint.url": "https://host/token",
            "ssl.keystore.type": "PKCS12",
        }
    )


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("postgresql://u@h/d", set()),
        ("postgresql://u:p%40ss@h/d", {"p%40ss", "p@ss"}),
        ("postgresql://u:p:q?@a:1,b:2/d", {"p:q?"}),
        ("postgresql://u@h/d?x=1&password=p%26ss&y", {"p%26ss", "p&ss"}),
        ("postgresql:///d?sslpassword=pass&host=/tmp", {"pass"}),
        # The user's name alone reveals nothing new.
        ("postgresql://postgres:postgres@h/d", set()),
        ("postgresql://u:app@h/app", set()),
    ],
)
def test_the_passwords_of_a_url_are_found(url, found):
    assert find_passwords(url) == found
    assert not any(word in masked_url(url) for word in found)
