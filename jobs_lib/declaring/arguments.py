"""The arguments of declarations: checked early, and brought into one form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from jobs_lib.backoff import Retry, is_number
from jobs_lib.consuming.versions import LONGEST, name_table
from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.job import Cancel, Discard
from jobs_lib.jobs.limit import MOST, MOST_WORKERS, Limit, Workers
from jobs_lib.jobs.rate import Rate
from jobs_lib.jobs.type import check_name
from jobs_lib.postgres.values import split_table
from jobs_lib.reasons import spell_class

if TYPE_CHECKING:
    from jobs_lib.jobs.type import Rule


MOST_RECORDS = 10_000
"""The most records of a block, as in the setting."""
_LONGEST_HISTORY = timedelta(days=3_660)
"""The longest history, as in the setting: upkeep refuses a longer one."""


def choose_name(given: object, function: object, decorator: str) -> str:
    """The name of a declaration: the one given, or the function's.

    Raises:
        ConfigurationError: there is none.
    """
    if given is None:
        found = getattr(function, "__name__", "")
        if not found or found == "<lambda>":
            raise ConfigurationError(
                f"what @{decorator} declares has no name of its own: give one, as in "
                f'@{decorator}(name="charge")'
            )
        return str(found)
    if not isinstance(given, str):
        raise ConfigurationError(
            f"the name given to @{decorator} is {given!r}: a name is a str"
        )
    return given


def check_aliases(given: object, name: str) -> Sequence[str]:
    """The earlier names of a job type.

    Raises:
        ConfigurationError: the aliases are no list of names.
    """
    is_list = isinstance(given, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(alias, str) for alias in cast("Any", given)):
        raise ConfigurationError(
            f"the aliases of {name!r} are {given!r}: give a list of the type's "
            'earlier names, as in ["charge"]'
        )
    aliases = tuple(cast("Sequence[str]", given))
    for alias in aliases:
        check_name(alias)
    return aliases


def make_retry(given: Retry | int | None, name: str) -> Retry:
    """The policy; a number means the number of all attempts.

    Raises:
        ConfigurationError: it is neither.
    """
    if given is None:
        return Retry()
    if policy := _as_policy(given):
        return policy
    raise ConfigurationError(
        f"the retry of {name!r} is {given!r}: give exponential(max_attempts=…), or the "
        "number of attempts, 1 or more"
    )


def make_rules(
    given: Mapping[type[BaseException], Rule | int] | None, name: str
) -> dict[type[BaseException], Rule]:
    """The rules; each is an outcome or a policy.

    Raises:
        ConfigurationError: a rule is neither.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"the rules of {name!r} are {given!r}: give a mapping from exceptions to "
            "what they mean, as in {ValueError: Discard}"
        )
    rules: dict[type[BaseException], Rule] = {}
    for kind, rule in given.items():
        if not (inspect.isclass(kind) and issubclass(kind, BaseException)):
            raise ConfigurationError(
                f"the rules of {name!r} are for {kind!r}, which is no class of "
                "exceptions"
            )
        if rule is Discard or rule is Cancel:
            rules[kind] = rule
        elif policy := _as_policy(rule):
            rules[kind] = policy
        else:
            raise ConfigurationError(
                f"the rules of {name!r} say {rule!r} for {spell_class(kind)}: give "
                "Discard, Cancel, a policy such as exponential(max_attempts=3), or a "
                "number of attempts"
            )
    return rules


def check_texts(what: str, **given: object) -> None:
    """Refuse names that are not texts.

    Args:
        what: the declaration, for messages.
        given: the arguments, by their names.

    Raises:
        ConfigurationError: a name is no text, or empty.
    """
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(
                f"the {name} of {what} is {value!r}: give its name, a str"
            )


def check_tables(
    table: object, key: object, tables: object, versions: object, what: str
) -> tuple[dict[str, str], bool]:
    """Check the tables of a read model.

    Returns the column for the key of each table, and whether the versions are beside
    the tables.

    Raises:
        ConfigurationError: it is neither one table with its key, nor several.
    """
    if versions not in ("row", "side", None):
        raise ConfigurationError(
            f"versions of {what} are on the 'row' or at its 'side', not {versions!r}"
        )
    if tables is None:
        check_texts(what, table=table, key=key)
        return {str(table): str(key)}, versions == "side"
    if table is not None or key is not None:
        raise ConfigurationError(
            f"{what} has `tables`, which name their keys: leave `table` and `key` out"
        )
    if versions == "row":
        raise ConfigurationError(
            f"{what} has `tables`, whose rows share one version: leave "
            "versions='row' out"
        )
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigurationError(
            f"the `tables` of {what} are {tables!r}: give a mapping such as "
            "{'orders_rm': 'id', 'lines_rm': 'order_id'}"
        )
    for name, column in tables.items():
        check_texts(what, table=name, key=column)
    return dict(tables), True


def check_version(version: object, tables: Iterable[str], what: str) -> int:
    """Check the version of a read model; None stands for the first one.

    Raises:
        ConfigurationError: it is none, or makes the name of a table too long.
    """
    if version is None:
        return 1
    if type(version) is not int or version < 1:
        raise ConfigurationError(
            f"the version of {what} is {version!r}: give a number from 1 on"
        )
    for table in tables:
        _, name = split_table(name_table(table, version))
        if len(name.encode()) > LONGEST:
            raise ConfigurationError(
                f"version {version} of {what} would be named {name!r} beside another "
                f"version, and PostgreSQL cuts names after {LONGEST} bytes: give the "
                "table a shorter name"
            )
    return version


def check_rate(given: object, name: str) -> None:
    """Refuse a value that is no rate.

    Raises:
        ConfigurationError: it is no rate.
    """
    if given is not None and not isinstance(given, Rate):
        raise ConfigurationError(
            f"the rate of {name!r} is {given!r}: say in how many seconds, as in "
            f"Rate({given if type(given) is int else 5}, per=60)"
        )


def make_limit(given: object, name: str) -> Limit | None:
    """The limit; a number limits all jobs of the type together.

    Raises:
        ConfigurationError: the value is no limit.
    """
    if given is None:
        return None
    most, parameter = given if _is_pair(given) else (given, None)
    if type(most) is int and 1 <= most <= MOST:
        return Limit(most, parameter)
    raise ConfigurationError(
        f"the limit of {name!r} is {given!r}: give how many of its jobs may run at "
        f"once over all pods, 1 to {MOST:,}, as in limit=4, or how many for each value "
        'of a parameter, as in limit=(2, "tenant")'
    )


def _is_pair(given: object) -> TypeGuard[tuple[object, str]]:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], str)


def make_workers(given: object, name: str) -> Workers | None:
    """A type's own workers; a number makes workers for this type alone.

    Raises:
        ConfigurationError: the value means no workers.
    """
    if given is None:
        return None
    workers = Workers(given, name) if type(given) is int else given
    if (
        isinstance(workers, Workers)
        and type(workers.count) is int
        and 1 <= workers.count <= MOST_WORKERS
        and isinstance(workers.name, str)
        and workers.name
    ):
        return workers
    raise ConfigurationError(
        f"the workers of {name!r} are {given!r}: give how many of its jobs may run at "
        f"once in a process, 1 to {MOST_WORKERS:,}, as in workers=2, or what several "
        'types share, as in Workers(2, "reports")'
    )


def check_history(given: object, name: str) -> None:
    """Refuse a value that does not say how long finished jobs are kept.

    Raises:
        ConfigurationError: it does not.
    """
    if isinstance(given, bool):
        return
    is_time = isinstance(given, timedelta)
    if not is_time or not timedelta(0) < cast("timedelta", given) <= _LONGEST_HISTORY:
        raise ConfigurationError(
            f"the history of {name!r} is {given!r}: give True, False, or how long "
            f"finished jobs are kept, {_LONGEST_HISTORY.days:,} days at most, as in "
            "timedelta(days=3)"
        )


def check_seconds(
    given: Any, what: str, name: str, *, most: float = math.inf, zero: bool = False
) -> None:
    """Refuse a value that is no number of seconds.

    Args:
        given: the argument; None stands for its default.
        what: the argument's name.
        name: of the declaration.
        most: the largest number.
        zero: whether it may be 0.

    Raises:
        ConfigurationError: it is out of bounds, or no number.
    """
    if given is None:
        return
    if (
        is_number(given)
        and given < math.inf
        and (0 < given <= most or (zero and given == 0))
    ):
        return
    least = "0 or more" if zero else "above 0"
    bound = "" if most == math.inf else f" and at most {most:,.0f}"
    raise ConfigurationError(
        f"the {what} of {name!r} is {given!r}: give seconds, {least}{bound}"
    )


def check_block(block: object, seconds: object, what: str) -> None:
    """Refuse sizes of blocks that are out of bounds; None stands for the setting.

    Raises:
        ConfigurationError: one is no number, or out of bounds.
    """
    if block is not None and not (type(block) is int and 1 <= block <= MOST_RECORDS):
        raise ConfigurationError(
            f"the block of {what} is {block!r}: give the most records of a "
            f"transaction, 1 to {MOST_RECORDS:,}, or leave it out"
        )
    check_seconds(seconds, "block_seconds", what)


def check_per(per: object, what: str) -> str:
    """The name of what a handler is called with.

    Raises:
        ConfigurationError: there is no such way to call one.
    """
    if per == "record":
        return "record"
    if per == "block":
        return "records"
    raise ConfigurationError(
        f"the per of {what} is {per!r}: give 'record', or 'block' for a list of records"
    )


def check_partitions(given: object, topic: str) -> None:
    """Refuse a value that is no number of partitions; None stands for the default.

    Raises:
        ConfigurationError: it is no such number.
    """
    if given is None or (type(given) is int and given >= 1):
        return
    raise ConfigurationError(
        f"the partitions of the topic {topic!r} are {given!r}: give how many, 1 or "
        "more, or leave it out"
    )


def check_topic(
    name: str, partitions: object, entities: object, config: object
) -> None:
    """Refuse arguments with which no topic can be created; None stands for defaults.

    Raises:
        ConfigurationError: one of them is of another type, or out of bounds.
    """
    check_partitions(partitions, name)
    if entities is not None and (type(entities) is not int or entities < 0):
        raise ConfigurationError(
            f"the entities of the topic {name!r} are {entities!r}: give about how many "
            "keys it will have, or leave it out"
        )
    if config is not None and not isinstance(config, Mapping):
        raise ConfigurationError(
            f"the config of the topic {name!r} is {config!r}: give the names of "
            "Kafka's settings with their values, as in {'retention.ms': '60000'}"
        )


def check_flags(what: str, **given: object) -> None:
    """Refuse values that are neither True nor False; None stands for the default.

    Args:
        what: the declaration, for messages.
        given: the arguments, by their names.

    Raises:
        ConfigurationError: one is something else, which Python would take for True.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigurationError(
                f"the {name} of {what} is {value!r}: give True or False"
            )


def _as_policy(given: object) -> Retry | None:
    """The policy, given as such or as a number of attempts."""
    if isinstance(given, Retry):
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return Retry(max_attempts=given)
    return None
