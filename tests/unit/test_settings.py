"""Settings come from code, environment and file; errors name wrong ones, no secrets."""

from __future__ import annotations

import pytest

from jobs_lib.errors import ConfigurationError
from jobs_lib.masking import mask, masked_url
from jobs_lib.settings import (
    Settings,
    default_settings,
    load_settings,
    require_bootstrap_servers,
    require_database_url,
)

CANARY = "hunter2canary"


@pytest.fixture(autouse=True)
def config_file(tmp_path, monkeypatch):
    """A working folder for this test, where `jobs_lib.toml` would lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "jobs_lib.toml"


def test_everything_has_a_default():
    settings = load_settings()
    assert settings.database_url == ""
    assert settings.schema_name == "jobs_lib"
    assert settings.workers >= 1
    assert settings.pod


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("JOBS_LIB_WORKERS", "3")
    monkeypatch.setenv("JOBS_LIB_SCHEMA", "other")
    monkeypatch.setenv("JOBS_LIB_KAFKA", '{"linger.ms": "7"}')
    settings = load_settings()
    assert settings.workers == 3
    assert settings.schema_name == "other"
    assert settings.kafka == {"linger.ms": "7"}


def test_the_file_in_the_working_folder_is_read(config_file):
    config_file.write_text(
        'workers = 4\nschema_name = "other"\n[kafka]\nacks = "all"\n'
    )
    settings = load_settings()
    assert settings.workers == 4
    assert settings.schema_name == "other"
    assert settings.kafka == {"acks": "all"}


def test_another_file_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.toml").write_text("workers = 5\n")
    monkeypatch.setenv("JOBS_LIB_CONFIG_FILE", str(tmp_path / "elsewhere.toml"))
    assert load_settings().workers == 5


def test_code_wins_over_the_environment_and_that_over_the_file(
    config_file, monkeypatch
):
    config_file.write_text("workers = 4\nbatch = 40\nrelay_block = 400\n")
    monkeypatch.setenv("JOBS_LIB_WORKERS", "3")
    monkeypatch.setenv("JOBS_LIB_BATCH", "30")
    settings = load_settings(workers=2, schema_name="given")
    assert (settings.workers, settings.batch, settings.relay_block) == (2, 30, 400)
    assert settings.schema_name == "given"


@pytest.mark.guarantee("U4")
def test_all_wrong_values_are_named_at_once(config_file, monkeypatch):
    config_file.write_text("wrokers = 4\nbatch = 0\n")
    monkeypatch.setenv("JOBS_LIB_WORKERS", "many")
    monkeypatch.setenv("JOBS_LIB_POLL_INTERVAL", "-1")
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", "mysql://host/database")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    for name in ("wrokers", "batch", "workers", "poll_interval", "database_url"):
        assert name in str(caught.value)
    assert "mysql" in str(caught.value)
    assert "jobs_lib.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JOBS_LIB_KAFKA", '{"sasl.password": "' + CANARY),
        ("JOBS_LIB_KAFKA", '{"sasl.password": ["' + CANARY + '"]}'),
        ("JOBS_LIB_DATABASE_URL", f"mysql://user:{CANARY}@host/database"),
    ],
)
def test_a_wrong_value_is_not_shown_where_it_may_hold_a_password(
    name, value, monkeypatch
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert CANARY not in f"{caught.value} {caught.value!r}"
    assert caught.value.__suppress_context__


def test_coordination_needs_a_log():
    with pytest.raises(ConfigurationError, match="set coordination_topic to its name"):
        load_settings(ownership="coordination")
    found = load_settings(ownership="coordination", coordination_topic="shop.log")
    assert found.coordination_interval == 10


def test_a_file_that_is_no_toml_is_named(config_file):
    config_file.write_text("workers = = 4\n")
    with pytest.raises(ConfigurationError, match=r"jobs_lib\.toml is not valid TOML"):
        load_settings()


def test_a_named_file_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("JOBS_LIB_CONFIG_FILE", "gone.toml")
    with pytest.raises(ConfigurationError, match=r"gone\.toml, which is not there"):
        load_settings()


def test_passwords_are_not_in_the_text_of_the_settings():
    settings = load_settings(
        database_url=f"postgresql://user:{CANARY}@host/database",
        kafka={"sasl.password": CANARY},
    )
    assert CANARY not in f"{settings} {settings!r}"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("postgresql://u@h:1/d", "postgresql://u@h:1/d"),
        ("postgres://u@h:1/d", "postgres://u@h:1/d"),
        ("postgresql+psycopg://u@h:1/d", "postgresql://u@h:1/d"),
        ("", ""),
    ],
)
def test_the_url_is_brought_into_libpqs_form(given, kept):
    assert load_settings(database_url=given).database_url == kept


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        (f"postgresql://u:{CANARY}@h:1/d", "postgresql://u@h:1/d"),
        (f"postgresql://h/d?password={CANARY}", "postgresql://h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql:///d", "postgresql:///d"),
        (f"postgresql://u:{CANARY}?@a:1,b:2/d", "postgresql://u@a:1,b:2/d"),
        (f"postgresql://u:{CANARY}@[::1]:5/d", "postgresql://u@[::1]:5/d"),
        (f"host=h password={CANARY}", "a connection string"),
    ],
)
def test_a_masked_url_has_neither_password_nor_query(url, masked):
    assert masked_url(url) == masked


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        load_settings().workers = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("require", "variable"),
    [
        (require_database_url, "JOBS_LIB_DATABASE_URL"),
        (require_bootstrap_servers, "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS"),
    ],
)
def test_a_missing_server_is_an_error_with_the_way_out(require, variable):
    with pytest.raises(ConfigurationError, match=rf"set {variable}.*jobs-lib dev up"):
        require(load_settings())


def test_a_server_that_is_set_is_returned():
    settings = load_settings(
        database_url="postgresql://h/d", kafka_bootstrap_servers="h:9092"
    )
    assert require_database_url(settings) == "postgresql://h/d"
    assert require_bootstrap_servers(settings) == "h:9092"


def test_the_settings_of_the_process_are_read_once(monkeypatch):
    default_settings.cache_clear()
    try:
        first = default_settings()
        monkeypatch.setenv("JOBS_LIB_WORKERS", "3")
        assert default_settings() is first
    finally:
        default_settings.cache_clear()


def test_every_setting_says_what_it_means():
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_the_registrys_secrets_are_hidden():
    load_settings(
        schema_registry_url="http://a:first-canary@one,http://b:second-canary@two",
        schema_registry={
            "basic.auth.user.info": "c:third-canary",
            "bearer.auth.token": "fourth-canary",
        },
    )
    for secret in ("first-canary", "second-canary", "third-canary", "fourth-canary"):
        assert mask(f"no {secret} here") == "no *** here"


@pytest.mark.guarantee("FS2")
def test_settings_that_are_dumped_or_shown_hide_every_secret():
    url = f"postgresql://me:{CANARY}@host/database?password={CANARY}"
    registry = f"http://me:{CANARY}@one:1,http://me:{CANARY}@two:2"
    settings = load_settings(
        database_url=url,
        direct_url=url,
        schema_registry_url=registry,
        kafka={"sasl.password": CANARY, "ssl.key.pem": CANARY, "linger.ms": "7"},
        schema_registry={"basic.auth.user.info": f"me:{CANARY}", "timeout": 3.0},
    )
    shown = [
        *(repr(settings), str(settings), settings.model_dump_json()),
        *(str(settings.model_dump()), str(settings.model_dump(mode="json"))),
        str(settings.model_copy(update={"workers": 3}).model_dump()),
    ]
    assert not [one for one in shown if CANARY in one]
    dumped = settings.model_dump()
    assert dumped["database_url"] == "postgresql://me@host/database"
    assert dumped["schema_registry_url"] == "http://me@one:1,http://me@two:2"
    assert dumped["kafka"] == {
        "sasl.password": "***",
        "ssl.key.pem": "***",
        "linger.ms": "7",
    }
    assert settings.kafka["sasl.password"] == CANARY
    assert load_settings().model_dump()["database_url"] == ""


@pytest.mark.guarantee("FS9")
@pytest.mark.parametrize(
    "key",
    [
        "plugin.library.paths",
        "sasl.kerberos.keytab",
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.principal",
        "ssl.engine.id",
        "ssl.engine.location",
        "ssl.providers",
    ],
)
def test_a_file_found_by_chance_cannot_set_keys_that_run_code(
    config_file, monkeypatch, key
):
    config_file.write_text(f'[kafka]\n"linger.ms" = "7"\n"{key}" = "a thing"\n')
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert key in str(caught.value)
    assert "JOBS_LIB_KAFKA" in str(caught.value)
    assert "JOBS_LIB_CONFIG_FILE=jobs_lib.toml" in str(caught.value)
    monkeypatch.setenv("JOBS_LIB_CONFIG_FILE", "jobs_lib.toml")
    assert load_settings().kafka[key] == "a thing"
    monkeypatch.delenv("JOBS_LIB_CONFIG_FILE")
    config_file.write_text("workers = 4\n")
    monkeypatch.setenv("JOBS_LIB_KAFKA", f'{{"{key}": "another"}}')
    assert load_settings().kafka == {key: "another"}


@pytest.mark.parametrize(
    "servers", ["h:99092", "one:9092, h:99092", "h:0", "[::1]:65536"]
)
def test_a_broker_at_a_port_that_cannot_be_is_refused(servers):
    # The C library takes the last 16 bits of a larger number: another port.
    *_, refused = servers.split(", ")
    with pytest.raises(ConfigurationError, match="kafka_bootstrap_servers") as caught:
        load_settings(kafka_bootstrap_servers=servers)
    assert f"{refused!r} has no port from 1 to 65535" in str(caught.value)


@pytest.mark.parametrize("port", ["0", "65536", "99092"])
def test_a_registry_at_a_port_that_cannot_be_is_refused_without_its_password(port):
    given = f"http://one:8081, http://me:{CANARY}@two:{port}/path"
    with pytest.raises(ConfigurationError, match="schema_registry_url") as caught:
        load_settings(schema_registry_url=given)
    assert f"'two:{port}' has no port from 1 to 65535" in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        f"http://me:{CANARY},{CANARY}@one:8081",
        "http://one:8081,two:8081",
        "http://one:8081,",
        "one:8081",
    ],
)
def test_a_comma_that_ends_no_address_of_a_registry_is_refused(given):
    with pytest.raises(ConfigurationError, match="written %2C") as caught:
        load_settings(schema_registry_url=given)
    assert CANARY not in str(caught.value)


def test_a_slash_in_a_password_makes_it_no_port():
    url = "http://me:99092/secret@two:8081"
    assert load_settings(schema_registry_url=url).schema_registry_url == url


@pytest.mark.parametrize("servers", ["", "h", "h:9092,[::1]:65535", "PLAINTEXT://h:1"])
def test_any_other_address_of_a_broker_is_left_to_the_client(servers):
    settings = load_settings(kafka_bootstrap_servers=servers)
    assert settings.kafka_bootstrap_servers == servers


@pytest.mark.parametrize(
    "given",
    [{"heartbeat_interval": 3.0}, {"heartbeat_interval": 1.0, "stale_after": 1.9}],
)
def test_a_process_that_would_die_between_two_heartbeats_is_refused(given):
    with pytest.raises(ConfigurationError, match="less than two of heartbeat_interval"):
        load_settings(database_url="postgresql://h/d", **given)
    load_settings(database_url="postgresql://h/d", **{**given, "stale_after": 6.0})
