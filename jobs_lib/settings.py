"""The settings, read once from the environment (``JOBS_LIB_*``) or a TOML file.

Precedence: what code passes, then the environment, then the file that
``JOBS_LIB_CONFIG_FILE`` names (``jobs_lib.toml`` in the working folder by default).
"""

from __future__ import annotations

import os
import platform
import re
from difflib import get_close_matches
from functools import cache
from itertools import combinations
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from jobs_lib.addresses import LAST_PORT, check_port, check_registries, check_url
from jobs_lib.errors import ConfigurationError
from jobs_lib.masking import MASK, find_passwords, find_secrets, keep_secret, masked_url

# Read at their use; they are not settings of a running service.
_OTHER_VARIABLES = {
    "JOBS_LIB_APP",
    "JOBS_LIB_CACHE_DIR",
    "JOBS_LIB_CONFIG_FILE",
    "JOBS_LIB_LOG_FORMAT",
    "JOBS_LIB_LOG_LEVEL",
    "JOBS_LIB_MAVEN_BASE_URL",
    "JOBS_LIB_SCHEMA",
    "JOBS_LIB_SHARE",
}

_FILE = "jobs_lib.toml"
"""The file in the working folder, read unless the environment names another."""
RUNS_CODE = {
    "plugin.library.paths": "loads libraries",
    # A shell builds the client's default command from the first and the last.
    "sasl.kerberos.keytab": "is a part of a command for a shell",
    "sasl.kerberos.kinit.cmd": "is a command for a shell",
    "sasl.kerberos.principal": "is a part of a command for a shell",
    "ssl.engine.id": "loads an engine of OpenSSL",
    "ssl.engine.location": "loads an engine of OpenSSL",
    "ssl.providers": "loads providers of OpenSSL",
}
"""Settings of Kafka's client that make this process run other people's code."""

_SCHEMA_BYTES = 63
# Drivers read % and : as parameters, and $word$ ends the text of a function.
_NOT_IN_SCHEMA = re.compile(r"[%:\x00-\x1f\x7f\ud800-\udfff]|\$\w+\$")
# In a search path the second one means the role's own schema, quoted or not.
_TAKEN_SCHEMAS = {"public", "$user", "information_schema"}
_PLACEHOLDER = re.compile("{[^{}]*}")
_NAME = re.compile("[a-zA-Z0-9._-]*")

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    """Everything that can be set; each name is also ``JOBS_LIB_<NAME>``."""

    model_config = SettingsConfigDict(
        env_prefix="JOBS_LIB_",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        # In code and in the file the schema is `schema_name`.
        populate_by_name=True,
    )

    database_url: str = Field(
        "",
        repr=False,
        description="PostgreSQL, as `postgresql://user@host:port/database`.",
    )
    direct_url: str = Field(
        "",
        repr=False,
        description="PostgreSQL past PgBouncer: hints of new jobs and rows, migrations "
        "and the snapshots of re-exports use it.",
    )
    pgbouncer: bool = Field(
        False,
        description="Whether `database_url` is PgBouncer's, in transaction mode.",
    )
    database_timeout: float = Field(
        30.0,
        ge=1,
        le=3_600,
        description="Seconds without an answer after which a connection of the library "
        "counts as lost.",
    )
    kafka_bootstrap_servers: str = Field(
        "", description="Kafka brokers, as `host:port,host:port`."
    )
    kafka: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Any librdkafka setting, passed through unchanged, as JSON.",
    )
    environment: str = Field(
        "",
        pattern="^[a-zA-Z0-9_-]*$",
        max_length=50,
        description="The environment's name, such as `dev`: topics and consumer groups "
        "have it in their names, and a database serves no other one.",
    )
    environments: list[str] = Field(
        default_factory=list,
        description="All existing environments, as JSON: a name that belongs to "
        "another one of them is refused at start.",
    )
    topic_template: str = Field(
        "{environment}.{name}",
        description="How topics and consumer groups are named in Kafka where there is "
        "an environment.",
    )
    schema_registry_url: str = Field(
        "",
        repr=False,
        description="The schema registry of Avro values, as `http://host:port`; "
        "`mock://name` keeps the schemas in the process, for tests.",
    )
    schema_registry: dict[str, str | float | bool] = Field(
        default_factory=dict,
        repr=False,
        description="Any other setting of Confluent's registry client, such as "
        "`basic.auth.user.info`, as JSON; `timeout` is in seconds, 5 by default.",
    )
    schema_name: str = Field(
        "jobs_lib",
        validation_alias="JOBS_LIB_SCHEMA",
        description="The database schema that holds every table of this library, and "
        "nothing else: 1 to 63 bytes.",
    )
    pod: str = Field(
        default_factory=platform.node,
        min_length=1,
        max_length=200,
        description="The name of this pod; a sidecar must have its service's name.",
    )
    workers: int = Field(
        8, ge=1, le=1_000, description="Threads that run job handlers."
    )
    async_workers: int = Field(
        100, ge=1, le=10_000, description="Async job handlers that run at once."
    )
    own_workers: dict[str, Annotated[int, Field(ge=1, le=1_000)]] = Field(
        default_factory=dict,
        description="Other numbers of workers for job types that have their own, by "
        'name, as JSON: `{"reports": 4}`.',
    )
    batch: int = Field(
        4_000,
        ge=2,
        le=10_000,
        description="The most jobs in flight; more cost memory.",
    )
    poll_interval: Seconds = Field(
        0.05,
        description="Seconds between two polls for new jobs when idle, times ten while "
        "hints come.",
    )
    relay_poll_interval: Seconds = Field(
        0.05,
        description="Seconds between two polls for outbox rows when idle. While the "
        "relay receives hints, it polls after ten times as long.",
    )
    relay_block: int = Field(
        5_000,
        ge=1,
        le=50_000,
        description="Outbox rows sent in one transaction; fewer where their values "
        "exceed about 8 MiB.",
    )
    heartbeat_interval: Seconds = Field(
        1.0, description="Seconds between two heartbeats of a process."
    )
    stale_after: Seconds = Field(
        5.0,
        validate_default=True,
        description="Seconds without a heartbeat until a process counts as dead. After "
        "nine tenths of them it begins no more jobs itself.",
    )
    session_timeout: Seconds = Field(
        10.0,
        description="Kafka's session timeout in seconds, for consumer groups. A relay "
        "that has not reached Kafka for as long leaves its shards to others.",
    )
    group_heartbeat_interval: Seconds = Field(
        1.0, description="Kafka's heartbeat interval in seconds, for consumer groups."
    )
    assignment_strategy: Literal["cooperative-sticky", "range", "roundrobin"] = Field(
        "cooperative-sticky",
        description="How a consumer group shares partitions, by the classic protocol.",
    )
    group_protocol: Literal["classic", "consumer"] = Field(
        "classic",
        description="Kafka's protocol of consumer groups: `consumer` is KIP-848's, "
        "whose timeouts and assignor are the broker's. It needs confluent-kafka 2.15 "
        "or newer.",
    )
    static_membership: bool = Field(
        False,
        description="Whether a pod that restarts within the session timeout gets its "
        "partitions back without a rebalance: its name is its group.instance.id.",
    )
    origins: str = Field(
        "",
        description="Which origins the executor owns: `all`, or a list such as "
        "`orders/0,orders/1`. By default those of the partitions that the pod has, "
        "and without Kafka a share with the other processes.",
    )
    coordination_topic: str = Field(
        "",
        pattern="^[a-zA-Z0-9._-]*$",
        max_length=249,
        description="The coordination log's name in Kafka, over which partitions are "
        "shared without a consumer group: `jobs-lib coordination create` makes it.",
    )
    coordination_interval: float = Field(
        10.0,
        ge=0.1,
        le=3_600,
        description="Seconds. In each such interval a process writes three times into "
        "the coordination log what it holds. After two to three intervals of silence "
        "others take that over.",
    )
    ownership: Literal["database", "coordination"] = Field(
        "database",
        validate_default=True,
        description="How processes share what they own. `database`: Kafka's groups "
        "share the partitions of consumers, and heartbeats in PostgreSQL the rest. "
        "`coordination`: the coordination log shares all of it.",
    )
    give_up_after: Seconds = Field(
        30.0,
        description="Seconds without an answer of PostgreSQL after which a pod leaves "
        "its consumer groups, so that others have its partitions.",
    )
    follow_interval: Seconds = Field(
        1.0,
        description="Seconds between two polls of the service's group by a sidecar.",
    )
    handover_timeout: Seconds = Field(
        5.0,
        description="Seconds that running work has to finish when a partition moves.",
    )
    shutdown_timeout: Seconds = Field(
        25.0, description="Seconds that running work has to finish on SIGTERM."
    )
    probes_port: int = Field(
        0,
        ge=0,
        le=LAST_PORT,
        description="Where a process answers `/livez`, `/readyz` and `/metrics`; 0 for "
        "nowhere.",
    )
    metrics: bool = Field(
        True,
        description="Whether `/metrics` is answered, where the extra `metrics` is "
        "installed.",
    )
    max_memory: float = Field(
        0.0,
        ge=0,
        description="MiB of memory above which a process ends in order, so that its "
        "supervisor restarts it; 0 for no limit.",
    )
    max_jobs: int = Field(
        0,
        ge=0,
        description="The number of jobs after which a process ends so; 0 for no limit.",
    )
    consumer_block: int = Field(
        5_000,
        ge=1,
        le=10_000,
        description="The most records handled in one transaction. While there are "
        "fewer, nothing waits for more.",
    )
    consumer_block_seconds: Seconds = Field(
        1.0,
        description="The longest a transaction of a consumer handles records, in "
        "seconds: it commits after the record in which they have passed, so that a "
        "partition can move soon.",
    )
    consumer_prefetch_bytes: int = Field(
        8_388_608,
        ge=1_048_576,
        description="Memory for the records of a group that wait to be handled, "
        "without what Kafka's client keeps for itself.",
    )
    gate_refresh: float = Field(
        1.0,
        ge=0.01,
        le=3_600,
        description="Seconds between two questions to Kafka about how far the groups "
        "are that consumers and jobs wait for (`after`). An answer counts for three "
        "times as long.",
    )
    answer_seconds: float = Field(
        300.0,
        ge=60,
        le=86_400,
        description="Seconds for which an entity that an update has returned is kept "
        "at least while the read model does not have its version; longer while the "
        "read model is behind.",
    )
    publish_timeout: Seconds = Field(
        10.0,
        description="Seconds that a publish to a stream waits for Kafka's "
        "acknowledgement.",
    )
    request_seconds: float = Field(
        86_400.0,
        ge=60,
        le=172_800,
        description="Seconds for which the id of a request is remembered at least. "
        "Streams are not compacted within this time.",
    )
    history_days: int = Field(
        1,
        ge=0,
        le=3_660,
        description="Days that finished jobs can still be looked up; 0 for not at all.",
    )
    transactions: int = Field(
        10,
        ge=1,
        le=1_000,
        description="The most connections that `app.transaction()` opens.",
    )
    notify: bool = Field(
        True, description="Whether an enqueue wakes listening executors."
    )
    payload_limit: int = Field(
        1_048_576, ge=1, description="The most bytes of a job's payload as JSON."
    )

    def model_post_init(self, context: Any, /) -> None:
        """Keep the secrets out of every text, no matter how the settings are used."""
        keep_secret(find_passwords(self.database_url))
        keep_secret(find_passwords(self.direct_url))
        keep_secret(find_secrets(self.kafka))
        for url in self.schema_registry_url.split(","):
            keep_secret(find_passwords(url))
        registry = {key: str(value) for key, value in self.schema_registry.items()}
        keep_secret(find_secrets(registry))

    @field_serializer("database_url", "direct_url")
    def _hide_password(self, url: str) -> str:
        """Hide secrets: an error tracker, for example, may dump the settings."""
        return masked_url(url) if url else url

    @field_serializer("schema_registry_url")
    def _hide_passwords(self, urls: str) -> str:
        return ",".join(masked_url(url.strip()) for url in urls.split(",") if url)

    @field_serializer("kafka", "schema_registry")
    def _hide_secrets(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            key: MASK if find_secrets({key: str(value)}) else value
            for key, value in given.items()
        }

    @field_validator("database_url", "direct_url")
    @classmethod
    def _is_postgres(cls, url: str) -> str:
        try:
            return check_url(url) if url else url
        except ConfigurationError as error:
            raise ValueError(str(error)) from None

    @field_validator("schema_registry_url")
    @classmethod
    def _are_urls(cls, urls: str) -> str:
        if urls:
            check_registries(urls)
        return urls

    @field_validator("kafka_bootstrap_servers", "schema_registry_url")
    @classmethod
    def _has_ports(cls, addresses: str) -> str:
        for address in addresses.split(","):
            check_port(address.strip())
        return addresses

    @field_validator("schema_name")
    @classmethod
    def _is_schema(cls, name: str) -> str:
        try:
            check_schema(name)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return name

    @field_validator("stale_after")
    @classmethod
    def _outlasts_heartbeats(cls, seconds: float, info: ValidationInfo) -> float:
        interval = info.data.get("heartbeat_interval", 0.0)
        if seconds < 2 * interval:
            raise ValueError(
                f"{seconds:g} s are less than two of heartbeat_interval, {interval:g} "
                "s: a process would count as dead between two heartbeats"
            )
        return seconds

    @field_validator("ownership")
    @classmethod
    def _has_log(cls, ownership: str, info: ValidationInfo) -> str:
        # A name that was refused itself is not there.
        if ownership == "coordination" and info.data.get("coordination_topic") == "":
            raise ValueError(
                "coordination needs a log: set coordination_topic to its name in Kafka"
            )
        return ownership

    @field_validator("topic_template")
    @classmethod
    def _is_template(cls, template: str, info: ValidationInfo) -> str:
        if sorted(_PLACEHOLDER.findall(template)) != ["{environment}", "{name}"]:
            raise ValueError(
                f"{template!r} must have {{environment}} and {{name}} in it, once each"
            )
        if not _NAME.fullmatch(_PLACEHOLDER.sub("", template)):
            raise ValueError(
                f"{template!r} may have letters, digits and . _ - beside these"
            )
        # What was refused itself is not there.
        known = {*info.data.get("environments", ()), info.data.get("environment", "")}
        for one, other in combinations(sorted(known - {""}), 2):
            if _may_meet(template, one, other):
                raise ValueError(
                    f"{template!r} can give a topic of the environment {one!r} the "
                    f"same name as one of {other!r}: separate environment and name by "
                    "a character that no environment has, such as a dot"
                )
        return template

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(TomlConfigSettingsSource):
    """The file that the environment names, or the one of the working folder."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        named = os.environ.get("JOBS_LIB_CONFIG_FILE")
        self._is_named = bool(named)
        file = Path(_FILE if named is None else named)
        try:
            super().__init__(settings_cls, toml_file=file)
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(
                f"{file} cannot be read: {_explain_file(error)}"
            ) from None

    def __call__(self) -> dict[str, Any]:
        """The values in the file.

        Raises:
            ConfigurationError: the file would run code, and the environment does not
                name it: it may have come with a folder that somebody only inspects.
        """
        found = super().__call__()
        kafka = found.get("kafka")
        if self._is_named or not isinstance(kafka, dict):
            return found
        for key in sorted(RUNS_CODE.keys() & kafka.keys()):
            raise ConfigurationError(
                f"the Kafka setting {key} {RUNS_CODE[key]}, and the {_FILE} of the "
                "working folder may not set it: set it in JOBS_LIB_KAFKA, or name the "
                f"file by JOBS_LIB_CONFIG_FILE={_FILE}"
            )
        return found


def _explain_file(error: Exception) -> str:
    """Why a file cannot be read, without what is in it."""
    if isinstance(error, UnicodeDecodeError):
        return f"its byte {error.start + 1} is not UTF-8. Save it as UTF-8"
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    return f"{getattr(error, 'strerror', None) or error}"


def _may_meet(template: str, one: str, other: str) -> bool:
    """Whether some names of two environments are the same."""
    before, after = template.replace("{environment}", one).split("{name}")
    begins, ends = template.replace("{environment}", other).split("{name}")
    return (before.startswith(begins) or begins.startswith(before)) and (
        after.endswith(ends) or ends.endswith(after)
    )


def check_schema(name: str) -> None:
    """Refuse a name that the library's schema cannot have.

    Raises:
        ConfigurationError: the name is refused; the text says why.
    """
    size = len(name.encode(errors="replace"))
    if not 1 <= size <= _SCHEMA_BYTES:
        problem = f"has {size} bytes, and may have 1 to {_SCHEMA_BYTES}"
    elif found := _NOT_IN_SCHEMA.search(name):
        problem = (
            f"has {found[0]!r} in it, and may have no %, :, $word$ or control character"
        )
    elif name.startswith("pg_") or name in _TAKEN_SCHEMAS:
        problem = "is taken: the tables need a schema of their own"
    else:
        return
    raise ConfigurationError(
        f"the schema's name {name!r} {problem}. Choose another, such as jobs_lib"
    )


def load_settings(**given: object) -> Settings:
    """Read all settings from the environment and the file, and check them.

    Args:
        given: settings by their names in lower case, such as ``database_url``, which
            win over environment and file. The schema's is ``schema_name``.

    Raises:
        ConfigurationError: values are out of range, or names unknown: one error names
            all wrong values. Or the file is not there, or cannot be read.
    """
    file = os.environ.get("JOBS_LIB_CONFIG_FILE")
    if file and not Path(file).is_file():
        raise ConfigurationError(
            f"JOBS_LIB_CONFIG_FILE names {file}, which is not there: correct it, or "
            "unset it to use the environment and jobs_lib.toml alone"
        )
    _refuse_unknown_variables()
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except TOMLDecodeError as error:
        raise ConfigurationError(
            f"{file or _FILE} is not valid TOML: {error}"
        ) from None
    except SettingsError as error:
        # The error's cause would show the value, which may hold a password.
        raise ConfigurationError(
            f"these settings cannot be used: {error}. Is it valid JSON?"
        ) from None
    except RecursionError:
        raise ConfigurationError(
            "the JSON of a setting in the environment is nested too deeply: correct it"
        ) from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
        )
        raise ConfigurationError(
            f"these settings cannot be used: {problems}. "
            "Each can be set as JOBS_LIB_<NAME> in the environment or in jobs_lib.toml."
        ) from None


def _refuse_unknown_variables() -> None:
    """Refuse misspelt names, which would silently have no effect."""
    known = {f"JOBS_LIB_{name.upper()}" for name in Settings.model_fields}
    known |= _OTHER_VARIABLES
    unknown = {
        name
        for name in os.environ
        if name.startswith("JOBS_LIB_")
        and name not in known
        and not name.startswith("JOBS_LIB_TEST_")
    }
    if unknown:
        name = min(unknown)
        similar = get_close_matches(name, known, n=1)
        raise ConfigurationError(
            f"there is no setting {name}"
            + (f": is it {similar[0]}?" if similar else ": unset it")
        )


@cache
def default_settings() -> Settings:
    """The settings of this process, read at the first use."""
    return load_settings()


def require_database_url(settings: Settings) -> str:
    """The database's URL, or a ConfigurationError that says how to give one."""
    if not settings.database_url:
        raise ConfigurationError(
            "no database is set: set JOBS_LIB_DATABASE_URL, or start one with "
            '`jobs-lib dev up` and then `eval "$(jobs-lib dev env)"`'
        )
    return settings.database_url


def require_bootstrap_servers(settings: Settings) -> str:
    """Kafka's addresses, or a ConfigurationError that says how to give them."""
    if not settings.kafka_bootstrap_servers:
        raise ConfigurationError(
            "no Kafka broker is set: set JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS, or start "
            'one with `jobs-lib dev up` and then `eval "$(jobs-lib dev env)"`'
        )
    return settings.kafka_bootstrap_servers


def require_schema_registry(settings: Settings) -> str:
    """The registry's URL, or a ConfigurationError that says how to give one."""
    if not settings.schema_registry_url:
        raise ConfigurationError(
            "a topic has an Avro schema, and no schema registry is set: set "
            "JOBS_LIB_SCHEMA_REGISTRY_URL, in tests to mock://tests"
        )
    return settings.schema_registry_url
