"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

TIMES = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])
"""The forms of a time, in UTC."""

IDS = click.IntRange(1, 2**63 - 1)
"""The ids that a row can have."""
OFFSETS = click.IntRange(0, 2**63 - 1)
"""The offsets that a record can have."""
PARTITIONS = click.IntRange(0, 2**31 - 2)
"""The numbers that a partition can have."""
COUNTS = click.IntRange(1, 2**31 - 1)
"""How many partitions a topic can have."""

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class FiniteRange(click.FloatRange):
    """Numbers within bounds. NaN is below no bound, so that click lets it through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Read the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        # click's own text of a number without bounds is "x<=None".
        bounded = self.min is not None or self.max is not None
        return super()._describe_range() if bounded else ""


def read_duration(
    context: click.Context, option: click.Parameter, value: str | None
) -> timedelta | None:
    """Read a number and its unit, such as ``90s``; the callback of an option."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", value)
    if found is None:
        raise click.BadParameter(
            f"{value!r} is no duration: give a number and its unit, such as 90s, 10m, "
            "2h or 1d"
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def read_time(
    context: click.Context, option: click.Parameter, value: str | None
) -> datetime | None:
    """Read a time of ISO 8601, in UTC by default; the callback of an option."""
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no time: give it as in 2026-08-01T22:00, in UTC"
        ) from None


def log_options() -> list[str]:
    """The options with which a child process logs like its parent."""
    given = click.get_current_context().find_root().params
    options = ["--log-level", given["log_level"], "--log-format", given["log_format"]]
    return [*options, "--verbose"] if given["verbose"] else options


app_argument = click.argument("app", metavar="MODULE:APP", envvar="JOBS_LIB_APP")


wait_option = click.option(
    "--wait",
    type=FiniteRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to wait for open transactions that have enqueued jobs with groups.",
)


processes_option = click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="The number of processes that share the work.",
)
