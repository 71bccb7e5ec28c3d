"""A refusal by a Kafka with passwords, certificates and rights is named at once."""

from __future__ import annotations

import json
import re
import time

import pytest

from jobs_lib import operating
from jobs_lib.errors import AccessError
from jobs_lib.kafka.positions import Positions
from jobs_lib.operating.topics import apply_topics
from jobs_lib.service.service import Service
from tests.security.helpers import CANARY, User
from tests.support.apps import count, count_unsent, heard, running
from tests.support.records import produce, read_topic
from tests.support.secured import ELSEWHERE, EXPIRED, SECURED
from tests.support.waiting import least

SOON = 5.0
"""The seconds in which a service that cannot start must say why."""


def listen(app, topic):
    """Let an app consume a topic; return the list in which it notes the records."""
    seen = []

    @app.consumer(topic, group=f"{topic}-group")
    def handle(record, connection) -> None:
        seen.append(record.value)

    return seen


def refuse(app, *parts):
    """Start a service that must soon be refused; return the text."""
    texts: list[str] = []

    def start() -> float:
        service = Service(app, parts or ("consumers", "relay"))
        began = time.monotonic()
        try:
            with pytest.raises(AccessError) as caught:
                service.start()
        finally:
            if service.is_ready:
                service.stop()
        assert CANARY not in f"{caught.value!r}"
        texts.append(str(caught.value))
        return time.monotonic() - began

    assert least(start, SOON) < SOON
    return texts[-1]


@pytest.mark.guarantee("FK11")
@pytest.mark.parametrize(
    ("listener", "changed", "what", "where"),
    [
        (SECURED, {"sasl.password": CANARY}, "'alice' in: .*sasl_ssl://", "sasl.pass"),
        (SECURED, {"sasl.username": "carol"}, "'carol' in: .*Invalid", "sasl.username"),
        (
            SECURED,
            {"sasl.mechanism": "SCRAM-SHA-512"},
            "supported mechanisms: PLAIN",
            "sasl.mechanism",
        ),
        (
            SECURED,
            {"ssl.ca.location": "stranger"},
            "cannot be trusted: unable to get local issuer",
            "ssl.ca.location",
        ),
        (EXPIRED, {}, "cannot be trusted: certificate has expired", "a new one"),
        (
            ELSEWHERE,
            {},
            "cannot be trusted: IP address mismatch",
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS",
        ),
        (
            SECURED,
            {"security.protocol": "sasl_plaintext"},
            "speaks TLS, and this client plain text",
            "security.protocol",
        ),
        (
            SECURED,
            {"security.protocol": "", "sasl.username": "", "sasl.password": ""},
            "speaks TLS, and this client plain text",
            "security.protocol",
        ),
    ],
    ids=[
        *("password", "user", "mechanism", "authority", "expired", "host", "sasl"),
        "plaintext",
    ],
)
def test_a_service_that_is_not_let_in_says_why_and_does_not_start(
    secured, secured_app, listener, changed, what, where
):
    if "ssl.ca.location" in changed:
        changed = {"ssl.ca.location": str(secured.stranger)}
    text = refuse(secured_app(changed, listener))
    assert re.search(what, text), text
    assert where in text
    assert secured.address_of(listener) in text


def test_a_host_name_need_not_fit_if_it_is_not_asked_for(secured_app):
    app = secured_app({"ssl.endpoint.identification.algorithm": "none"}, ELSEWHERE)
    app.job(name="work")(lambda job: None)
    with running(app, "executor"):
        pass


@pytest.mark.parametrize(
    ("rights", "what"),
    [
        (set(), "alice.* READ on the topic '{topic}'"),
        ({"DESCRIBE topic"}, "alice.* READ on the topic '{topic}'"),
        ({"READ topic"}, "alice.* READ on the consumer group '{topic}-group'"),
        (
            {"READ topic", "DESCRIBE group"},
            "alice.* READ on the consumer group '{topic}-group'",
        ),
    ],
    ids=["nothing", "describe", "group", "describe-group"],
)
def test_a_consumer_that_may_not_read_does_not_start(
    secured_app, secured_topic, grant, rights, what
):
    topic = secured_topic()
    for right in rights:
        operation, kind = right.split()
        name = topic if kind == "topic" else f"{topic}-group"
        grant("alice", kind.upper(), name, operation)
    app = secured_app()
    listen(app, topic)
    text = refuse(app, "consumers")
    assert re.search(what.format(topic=topic), text), text
    assert "sasl.username" in text


def test_a_consumer_that_may_not_ask_how_far_others_are_does_not_start(
    secured_app, secured_topic, grant
):
    topic, other = secured_topic(), secured_topic()
    grant("alice", "TOPIC", topic, "READ")
    grant("alice", "GROUP", f"{topic}-group", "READ")
    app = secured_app()

    @app.consumer(topic, group=f"{topic}-group", after=[(other, "others")])
    def handle(record, connection) -> None: ...

    waits = secured_app()

    @waits.job(after=[(other, "others")])
    def work(job) -> None: ...

    for one, part in ((app, "consumers"), (waits, "executor")):
        assert f"alice' DESCRIBE on the topic '{other}'" in refuse(one, part)
    grant("alice", "TOPIC", other, "DESCRIBE")
    text = refuse(waits, "executor")
    assert "alice' DESCRIBE on the consumer group 'others'" in text
    text = refuse(app, "consumers")
    assert "alice' DESCRIBE on the consumer group 'others'" in text
    grant("alice", "GROUP", "others", "DESCRIBE")
    with running(app, "consumers"):
        pass


@pytest.mark.expects("loop.failed")
def test_a_relay_that_may_not_write_does_not_start(
    secured_app, secured_topic, grant, wait_for
):
    app = secured_app()
    topic = app.topic(secured_topic(), value=int)
    grant("alice", "TOPIC", topic.name, "READ")
    text = refuse(app, "relay")
    assert f"alice' WRITE on the topic '{topic.name}'" in text
    # A broker reveals nothing about a transactional id before its first use.
    grant("alice", "TOPIC", topic.name, "WRITE")
    with running(app, "relay") as service:
        wait_for(lambda: service.failure, timeout=60, what="it ends by itself")
        is_ready = service.is_ready
    assert isinstance(service.failure, AccessError)
    assert not is_ready, "a web server that holds it would seem to be well"
    text = str(service.failure)
    assert re.search("alice' WRITE on the transactional id 'jobs_lib-.*-\\d+'", text)
    assert "sasl.username" in text


@pytest.mark.guarantee("FK11")
@pytest.mark.parametrize("request_id", [None, "r1"])
def test_a_publish_that_is_not_let_in_or_may_not_write_says_why(
    secured_app, secured_topic, grant, request_id
):
    topic = secured_topic()
    wrong = secured_app({"sasl.password": CANARY}, publish_timeout=2)
    with pytest.raises(AccessError, match="does not let the user 'alice' in") as told:
        wrong.stream(topic).publish("k", 1, request=request_id)
    assert CANARY not in f"{told.value!r}"
    app = secured_app(publish_timeout=2)
    grant("alice", "TOPIC", topic, "READ")
    with pytest.raises(AccessError, match=f"WRITE on the topic '{topic}'"):
        app.stream(topic).publish("k", 1, request=request_id)
    grant("alice", "TOPIC", topic, "WRITE")
    allowed = secured_app()
    assert allowed.stream(topic).publish("k", 1, request="r2").offset == 0
    for one in (wrong, app, allowed):
        one.close()


def test_a_topic_that_may_not_be_created_is_named(secured_app, grant):
    app = secured_app()
    app.topic("secured-new", value=int)
    with pytest.raises(AccessError, match="CREATE on the topic 'secured-new'"):
        apply_topics(app)
    grant("alice", "TOPIC", "secured-new", "DESCRIBE")
    with pytest.raises(AccessError, match="CREATE on the topic 'secured-new'"):
        apply_topics(app)


def test_a_user_with_all_rights_consumes_and_sends(
    secured, secured_app, secured_topic, grant, connect, wait_for
):
    read, written = secured_topic(), secured_topic()
    allow(grant, "alice", read, written)
    app = secured_app(home=read, session_timeout=60.0)
    seen = listen(app, read)
    topic = app.topic(written, value=int)
    produce(secured.bootstrap_servers, read, [("a", 1)])
    with connect() as connection:
        topic.send(connection, key="a", value=2)
    with running(app, "consumers", "relay"):
        wait_for(lambda: seen == [1], timeout=30, what="it is handled")
        wait_for(
            lambda: [r.json for r in read_topic(secured.bootstrap_servers, written)],
            timeout=30,
            what="it is sent",
        )


def test_positions_that_may_not_be_read_are_named_and_the_others_are_given(
    secured_app, secured_topic, grant, wait_for
):
    topic, hidden = secured_topic(), secured_topic()
    grant("alice", "TOPIC", topic, "DESCRIBE")
    grant("alice", "GROUP", "mine", "DESCRIBE")
    positions = Positions(secured_app().settings, "mine", interval=0.05)

    def ask() -> bool:
        given = [positions.ask_ends(topic), positions.ask_committed("mine", topic)]
        denied = [positions.ask_ends(hidden), positions.ask_committed("theirs", topic)]
        assert denied == [None, None]
        return None not in given

    with heard("loop.failed") as failed:
        positions.start()
        try:
            wait_for(ask, timeout=30, what="what is allowed is known")
            for what in (f"topic '{hidden}'", "consumer group 'theirs'"):
                told = f"DESCRIBE on the {what}"
                wait_for(
                    lambda told=told: (
                        ask() and any(told in fields["error"] for _, fields in failed)
                    ),
                    timeout=30,
                    what=told,
                )
        finally:
            positions.stop()
    assert all("AccessError" in fields["error"] for _, fields in failed)


# A queue of the client that is full lets Kafka answer while others are put in.
SHORT = {"queue.buffering.max.messages": "10"}


@pytest.mark.parametrize(
    ("kept", "kafka"),
    [("READ", {}), (None, {}), ("READ", SHORT), (None, SHORT)],
    ids=["READ", "None", "READ-short", "None-short"],
)
def test_a_topic_that_may_no_longer_be_written_holds_its_own_rows(
    secured, secured_app, secured_topic, grant, revoke, admin, connect, wait_for,
    kept, kafka,
):  # fmt: skip
    denied, granted = secured_topic(), secured_topic()
    allow(grant, "alice", denied, denied)
    allow(grant, "alice", granted, granted)
    if not kept:
        # A user who may read a topic also sees that it exists.
        revoke("alice", "TOPIC", denied, "READ")
    # The half of it is what a transaction may wait for a busy broker.
    app = secured_app(kafka, session_timeout=60.0)
    topics = [app.topic(name, value=int) for name in (denied, granted)]

    def send(numbers: range) -> None:
        with connect() as connection:
            for n in numbers:
                for topic in topics:
                    topic.send(connection, key=f"k{n % 3}", value=n)

    def await_unsent(waiting: int, held: int) -> None:
        wait_for(
            lambda: count_unsent(admin) == (waiting, held),
            timeout=30,
            what=lambda: f"{waiting} wait, {held} are held: {count_unsent(admin)}",
        )

    with running(app, "relay"):
        send(range(30))
        await_unsent(0, 0)
        revoke("alice", "TOPIC", denied, "WRITE")
        send(range(30, 60))
        await_unsent(0, 30)
        (hold,) = operating.list_holds(app.database())
        assert (hold.topic, hold.key, hold.rows) == (denied, None, 30)
        assert "TOPIC_AUTHORIZATION_FAILED" in hold.error
        assert CANARY not in hold.error
        grant("alice", "TOPIC", denied, "WRITE")
        operating.retry_holds(app.database(), topic=denied)
        await_unsent(0, 0)
    for name in (denied, granted):
        found: dict[str, list[int]] = {}
        for record in read_topic(secured.bootstrap_servers, name):
            found.setdefault(record.key, []).append(record.json)
        assert found == {f"k{n}": [*range(n, 60, 3)] for n in range(3)}


def declare_copying(app, read, written):
    """Let a function make events of a topic's records, in transactions."""
    stream = app.stream(written)

    @app.transactional(read, group=f"{read}-group")
    def copy(record):
        return stream.event(record.key, record.value)


@pytest.mark.parametrize("missing", ["TOPIC", "GROUP"])
def test_a_transactional_function_that_may_not_read_does_not_start(
    secured_app, secured_topic, grant, missing
):
    read, written = secured_topic(), secured_topic()
    names = {"TOPIC": read, "GROUP": f"{read}-group"}
    for kind, name in names.items():
        if kind != missing:
            grant("alice", kind, name, "READ")
    app = secured_app()
    declare_copying(app, read, written)
    assert re.search(f"alice' READ on the .*'{names[missing]}'", refuse(app))


@pytest.mark.guarantee("T19")
def test_an_event_that_is_refused_while_others_are_put_in_is_named(
    secured, secured_app, secured_topic, grant, wait_for
):
    read, written = secured_topic(), secured_topic()
    allow(grant, "alice", read, secured_topic())
    # A stream whose topic may be seen, but not written.
    grant("alice", "TOPIC", written, "DESCRIBE")
    app = secured_app(SHORT)
    stream = app.stream(written)

    @app.transactional(read, group=f"{read}-group")
    def copy(record):
        return [stream.event(record.key, n) for n in range(30)]

    produce(secured.bootstrap_servers, read, [("a", 1)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="the stream is denied")
        told = f"Kafka refuses an event for '{written}': TOPIC_AUTHORIZATION"
        assert told in failed[0][1]["error"]
        grant("alice", "TOPIC", written, "WRITE")
        wait_for(
            lambda: len(read_topic(secured.bootstrap_servers, written)) == 30,
            timeout=30,
            what="they are made",
        )


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("T19", "FS10")
def test_a_transactional_function_needs_the_rights_of_the_page_and_no_more(
    secured, secured_app, secured_topic, grant, wait_for
):
    read, written = secured_topic(), secured_topic()
    grant("alice", "TOPIC", read, "READ")
    grant("alice", "GROUP", f"{read}-group", "READ")
    app = secured_app()
    declare_copying(app, read, written)
    servers = secured.bootstrap_servers
    produce(servers, read, [("a", 1)])
    with (
        heard("loop.failed", "record.failed") as failed,
        running(app, "consumers"),
    ):
        id_ = f"'jobs_lib-[^']*-{read}-group-{app.settings.pod}'"
        denied = f"AccessError: .*alice' WRITE on the transactional id {id_}"
        wait_for(
            lambda: failed and re.search(denied, failed[-1][1]["error"]),
            timeout=30,
            what=lambda: f"the id is denied: {failed}",
        )
        grant("alice", "TRANSACTIONAL_ID", "jobs_lib-", "WRITE", prefixed=True)
        wait_for(
            lambda: failed[-1][0] == "record.failed",
            timeout=30,
            what=lambda: f"the stream is denied: {failed}",
        )
        told = failed[-1][1]["error"]
        assert f"Kafka refuses an event for '{written}': TOPIC_AUTHORIZATION" in told
        assert "may this client write to it" in told
        assert read_topic(servers, written) == []
        grant("alice", "TOPIC", written, "WRITE")
        wait_for(lambda: read_topic(servers, written), timeout=30, what="it is made")
    assert [one.json for one in read_topic(servers, written)] == [1]
    assert CANARY not in str(failed)


def allow(grant, user, read, written):
    """Grant all rights that a service needs, and no more."""
    grant(user, "TOPIC", read, "READ")
    grant(user, "GROUP", f"{read}-group", "READ")
    grant(user, "TOPIC", written, "WRITE")
    grant(user, "TRANSACTIONAL_ID", "jobs_lib-", "WRITE", prefixed=True)


def test_a_sidecar_that_may_not_ask_for_the_group_does_not_start(
    secured_app, secured_topic, grant
):
    topic = secured_topic()
    grant("alice", "TOPIC", topic, "DESCRIBE")
    app = secured_app(home=topic)
    listen(app, topic)

    @app.job()
    def work(job) -> None: ...

    with pytest.raises(AccessError, match=f"DESCRIBE on the .* '{topic}-group'"):
        Service(app, ["executor"], sidecar=True).start()


@pytest.mark.slow
def test_a_service_reports_a_changed_password_and_goes_on_when_it_is_back(
    secured,
    secured_app,
    secured_topic,
    grant,
    set_scram_password,
    connect,
    admin,
    wait_for,
):
    read, written = secured_topic(), secured_topic()
    allow(grant, "dora", read, written)
    set_scram_password("dora", CANARY)
    app = secured_app(
        {
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "dora",
            "sasl.password": CANARY,
            "reconnect.backoff.max.ms": "500",
        },
        home=read,
    )
    seen = listen(app, read)
    topic = app.topic(written, value=int)

    def named(loop):
        errors = [f["error"] for _, f in failed if f["loop"].startswith(loop)]
        return any(
            one.startswith("AccessError") and "sasl.password" in one for one in errors
        )

    with heard("loop.failed") as failed, running(app, "consumers", "relay") as service:
        produce(secured.bootstrap_servers, read, [("a", 1)])
        wait_for(lambda: seen == [1], timeout=30, what="it runs")
        # The broker asks again after three seconds, and then has another password.
        set_scram_password("dora", "another")
        wait_for(lambda: named("poll"), timeout=30, what="its consumer says so")
        wait_for(lambda: named("relay"), timeout=30, what="its relay says so")
        produce(secured.bootstrap_servers, read, [("a", 2)])
        with connect() as connection:
            topic.send(connection, key="a", value=3)
        assert service.failure is None
        set_scram_password("dora", CANARY)
        wait_for(lambda: seen == [1, 2], timeout=60, what="it handles what came")
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="it sends")
    assert CANARY not in str(failed)
    assert [r.json for r in read_topic(secured.bootstrap_servers, written)] == [3]


def test_the_run_command_ends_with_one_line_for_an_expired_certificate(
    secured, secret_url, run_process
):
    process = run_process(
        *("-m", "jobs_lib.cli", "run", "tests.security.service:app"),
        env={
            "JOBS_LIB_DATABASE_URL": secret_url,
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": secured.address_of(EXPIRED),
            "JOBS_LIB_KAFKA": json.dumps(User("alice").kafka(secured)),
        },
    )
    assert process.wait(timeout=60) == 2
    said = [line for line in process.errors if line.startswith("error: ")]
    assert len(said) == 1
    assert "certificate has expired" in said[0]
    assert CANARY not in process.output
