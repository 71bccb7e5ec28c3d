"""Explain why Kafka refuses a service: its password, a certificate, or a permission.

librdkafka tries again for ever and reports the first two only by a callback. For a
missing permission it gives a bare code. Here each becomes an AccessError with a way
out.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import AccessError, TopicError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.settings import Settings

_IDENTITY = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
}
_KINDS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "consumer group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
}
DESTROY_BROKER: int = getattr(KafkaError, "_DESTROY_BROKER", -137)
"""Once all connections are lost, the client begins anew with those that were set. Old
clients, which do not, have no name for it."""
SILENT = {
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    DESTROY_BROKER,
}
"""librdkafka's errors when no broker answers."""
SOON = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
"""Errors where a topic or a broker has just come: the client then asks anew."""
OF_RECORD = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError._INVALID_ARG,
}
"""Errors about one record; later records of its key must not pass it."""
OF_TOPIC = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
"""Errors about a topic, and so about all of its records."""
_UNKNOWN_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
MISSING = "Kafka's topics"
"""The subject of all errors about missing topics."""
_NAMES = ("sasl.username", "ssl.certificate.location")
"""The keys that identify a client."""
_UNTRUSTED = "certificate verify failed"
"""librdkafka's text for every fault of a certificate, under two codes."""
_OUT_OF_DATE, _OTHER_HOST = {9, 10}, {62, 64}
"""OpenSSL's codes for faults of a certificate."""
_SECONDS = 2.0


def is_soon_over(error: KafkaError) -> bool:
    """Whether a client should just try again: such as while a coordinator loads.

    librdkafka calls some of these errors final, where it has asked a broker that is
    not yet, or no longer, the coordinator.
    """
    return error.retriable() or error.code() in SOON


def find_refusal(
    error: KafkaError, settings: Settings, name: str = "", right: str = "this"
) -> AccessError | None:
    """Explain an error by which Kafka refuses a client; None for all other errors.

    Args:
        error: Kafka's or librdkafka's error.
        settings: the client's settings.
        name: the topic, group or transactional id that was asked for.
        right: the right that is needed, such as ``READ``.
    """
    if error.code() in _IDENTITY:
        return AccessError(
            f"Kafka does not let {_asker(settings)} in: {error.str()}. Look at "
            "`sasl.mechanism`, `sasl.username` and `sasl.password` in JOBS_LIB_KAFKA"
        )
    if error.code() == KafkaError._SSL or _UNTRUSTED in error.str():
        return AccessError(
            f"Kafka cannot be trusted, or does not trust us: {error.str()}. Look at "
            "`ssl.ca.location` and the other keys of TLS in JOBS_LIB_KAFKA, and at the "
            "broker's certificate: its authority, its last day and its host names"
        )
    if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        return deny(settings, "cluster", right)
    if error.code() in _KINDS:
        return deny(settings, f"{_KINDS[error.code()]} {name!r}", right)
    return None


def explain(
    error: KafkaError, settings: Settings, name: str = "", right: str = "this"
) -> Exception:
    """Turn an error into one with a way out, if one is known; else return it as it is.

    Args:
        error: Kafka's or librdkafka's error.
        settings: the client's settings.
        name: the topic, group or transactional id that was asked for.
        right: the right that is needed, such as ``READ``.
    """
    if (refusal := find_refusal(error, settings, name, right)) is not None:
        return refusal
    if error.code() in SILENT:
        return no_answer(settings, error.str())
    if error.code() in _UNKNOWN_TOPIC:
        return missing_topics(settings, [name])
    return KafkaException(error)


def explain_failed(
    error: KafkaError, settings: Settings, topic: str, right: str, told: str
) -> Exception:
    """Turn an error about a topic into one of ours.

    Args:
        error: Kafka's or librdkafka's error.
        settings: the client's settings.
        topic: that was asked for.
        right: the right that is needed, such as ``CREATE``.
        told: what could not be done, for an error of which nothing else is known.
    """
    found = explain(error, settings, topic, right)
    if isinstance(found, KafkaException):
        return TopicError(f"{told}: {error.str()}")
    return found


def no_answer(settings: Settings, reason: str, within: str = "") -> UnavailableError:
    """Make the error for brokers that do not answer."""
    error = UnavailableError(
        f"no Kafka broker at {settings.kafka_bootstrap_servers} answers{within}: "
        f"{reason}. Is it running, and are JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS and "
        "`security.protocol` in JOBS_LIB_KAFKA right?"
    )
    error.subject = "Kafka"
    return error


def missing_topics(settings: Settings, names: Iterable[str]) -> TopicError:
    """Make the error for topics that do not exist yet, or are not visible."""
    error = TopicError(
        f"Kafka at {settings.kafka_bootstrap_servers} has no topic "
        f"{', '.join(map(repr, names))}, or does not show it: `jobs-lib topics apply "
        "MODULE:APP` creates what the app declares. Work with it waits until then"
    )
    error.subject = MISSING
    return error


def deny(settings: Settings, resource: str, right: str) -> AccessError:
    """Make the error for a missing permission."""
    key = next((one for one in _NAMES if one in settings.kafka), "security.protocol")
    return AccessError(
        f"Kafka at {settings.kafka_bootstrap_servers} does not allow "
        f"{_asker(settings)} {right} on the {resource}: grant it, or does `{key}` in "
        "JOBS_LIB_KAFKA say that this is somebody else?"
    )


def find_tls_fault(settings: Settings) -> AccessError | None:
    """Find out what is wrong with TLS at the first broker.

    librdkafka says neither why it rejects a certificate, nor that a broker speaks TLS.
    """
    address = settings.kafka_bootstrap_servers.split(",")[0].strip()
    secure = "ssl" in settings.kafka.get("security.protocol", "").lower()
    host, _, port = address.rpartition(":")
    try:
        context = _make_context(settings) if secure else _trusting()
        with (
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as line,
            context.wrap_socket(line, server_hostname=host.strip("[]")),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        return AccessError(
            f"the certificate of Kafka at {address} cannot be trusted: "
            f"{error.verify_message.rstrip('.')}. {_way_out(error.verify_code)}"
        )
    except (OSError, ValueError):
        return None
    if secure:
        return None
    return AccessError(
        f"Kafka at {address} speaks TLS, and this client plain text: set "
        "`security.protocol` in JOBS_LIB_KAFKA to ssl or sasl_ssl"
    )


def _asker(settings: Settings) -> str:
    name = settings.kafka.get("sasl.username")
    return f"the user {name!r}" if name else "this client"


def _way_out(code: int) -> str:
    if code in _OUT_OF_DATE:
        return "Give the broker a new one, and look at this machine's clock"
    if code in _OTHER_HOST:
        return (
            "Name the broker in JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS as its certificate "
            "does (`ssl.endpoint.identification.algorithm`)"
        )
    return "Does `ssl.ca.location` in JOBS_LIB_KAFKA name the authority that signed it?"


def _make_context(settings: Settings) -> ssl.SSLContext:
    place = settings.kafka.get("ssl.ca.location", "")
    folder = bool(place) and Path(place).is_dir()
    context = ssl.create_default_context(
        cafile=place if place and not folder else None,
        capath=place if folder else None,
        cadata=settings.kafka.get("ssl.ca.pem"),
    )
    identified = settings.kafka.get("ssl.endpoint.identification.algorithm", "https")
    context.check_hostname = identified.lower() == "https"
    return context


def _trusting() -> ssl.SSLContext:
    """Make a context that only finds out whether there is TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
