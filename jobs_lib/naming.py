"""Names of topics and consumer groups in Kafka: each environment has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from jobs_lib.settings import Settings

BARE = "{name}"
"""The form of names if there are no environments."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The name of another system's topic or group, exactly as Kafka has it.

    The environment's template leaves it alone.
    """

    name: str

    def __repr__(self) -> str:
        return f"Exact({self.name!r})"


def plain_name(given: str | Exact) -> str:
    """The name as it was declared."""
    return given.name if isinstance(given, Exact) else given


def name_in_kafka(settings: Settings, given: str | Exact) -> str:
    """The name in Kafka of a topic or group, as the environment's template has it.

    Raises:
        ConfigurationError: the name is one that the template gives already, in this
            environment or in another: another one's topic must not be touched, and no
            environment be named twice.
    """
    name = plain_name(given)
    for environment in {settings.environment, *settings.environments} - {""}:
        before, after = _fill(settings, environment).split(BARE)
        if name.startswith(before) and name.endswith(after):
            bare = name[len(before) : len(name) - len(after)]
            raise ConfigurationError(
                f"{name!r} is a name of the environment {environment!r}, and this is "
                f"{settings.environment or 'none'!r}: declare it as {bare!r}, and each "
                "environment has its own"
            )
    if isinstance(given, Exact):
        return name
    return make_template(settings).replace(BARE, name)


def check_once(read: Sequence[tuple[str, str]]) -> None:
    """Refuse consumers that are one in Kafka, though they were declared as two.

    Args:
        read: the topic and the group of each, as named in Kafka.

    Raises:
        ConfigurationError: two are the same: one would get no records.
    """
    for topic, group in read:
        if read.count((topic, group)) > 1:
            raise ConfigurationError(
                f"two consumers read the topic {topic!r} in the group {group!r}, one "
                "by Exact and one by its name here: call both by the same one"
            )


def name_done(settings: Settings, group: str) -> str:
    """The group that tells how far another one is done, by their names in Kafka.

    Others name it ``<group>.done`` too, and the template completes that.
    """
    before, after = make_template(settings).split(BARE)
    if not (group.startswith(before) and group.endswith(after)):
        after = ""  # another system's
    return f"{group.removesuffix(after)}.done{after}"


def check_unjoined(groups: Collection[str], told: Mapping[str, str]) -> None:
    """Refuse consumers of groups that tell how far others are done with their jobs.

    Args:
        groups: of the consumers, as named in Kafka.
        told: the groups that tell, and of which ones.

    Raises:
        ConfigurationError: there are any: Kafka takes no offsets of such a group from
            somebody else while it has members.
    """
    for group in sorted(told.keys() & groups):
        raise ConfigurationError(
            f"a consumer is declared in the group {group!r}, which tells how far "
            f"{told[group]!r} is done (done=True): give it another name"
        )


def check_told_once(told: Iterable[tuple[str, str]]) -> None:
    """Refuse consumers that would tell one group two different offsets of a topic.

    Args:
        told: the topic and the consumer group of each such offset, as named in Kafka.

    Raises:
        ConfigurationError: two consumers name the same pair.
    """
    seen: set[tuple[str, str]] = set()
    for topic, group in told:
        if (topic, group) in seen:
            raise ConfigurationError(
                f"two consumers in the group {group!r} say how far it is done with the "
                f"topic {topic!r}: it reads that one, or what is derived from it. Give "
                "one of them a group of its own"
            )
        seen.add((topic, group))


def make_template(settings: Settings) -> str:
    """The template of this environment, in which only the name is open."""
    if not settings.environment:
        return BARE
    return _fill(settings, settings.environment)


def check_environment(settings: Settings, found: str) -> None:
    """Refuse a database of another environment.

    Raises:
        ConfigurationError: it is another one's; its topics are, too.
    """
    ours = settings.environment
    if found == ours:
        return
    if not found:
        raise ConfigurationError(
            f"the database serves no environment yet, and this process is of {ours!r}: "
            f"run `jobs-lib migrate` with JOBS_LIB_ENVIRONMENT={ours}"
        )
    raise ConfigurationError(
        f"the database belongs to the environment {found!r}, and this process to "
        f"{ours or 'none'!r}: correct JOBS_LIB_DATABASE_URL or JOBS_LIB_ENVIRONMENT. "
        f"If it is a copy, `jobs-lib migrate --copied-from {found}` makes it yours"
    )


def _fill(settings: Settings, environment: str) -> str:
    return settings.topic_template.replace("{environment}", environment)
