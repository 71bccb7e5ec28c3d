"""What the commands about re-exports are given: options, and what they name."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from jobs_lib.app import load_app
from jobs_lib.cli.options import FiniteRange
from jobs_lib.cli.pack import read_conf
from jobs_lib.errors import ReexportError
from jobs_lib.reexport.run import CHUNK
from spark_bridge.engine import KEEP
from spark_bridge.frames import FrameSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.app import App
    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database

_Command = TypeVar("_Command", bound="Callable[..., Any] | click.Command")

app_option = click.option(
    "--app",
    "path",
    metavar="MODULE:APP",
    envvar="JOBS_LIB_APP",
    required=True,
    help="The app that declares the entity. Also JOBS_LIB_APP.",
)
entity_argument = click.argument("name", metavar="ENTITY")
_rate = click.option("--rate", type=int, help="Records a minute.")
_window = click.option(
    "--window",
    metavar="HH:MM-HH:MM",
    help="Instead of a rate: hours of the day in which all keys are to be sent.",
)
_tz = click.option("--tz", help="Time zone of the window. Defaults to this machine's.")
ranges_option = click.option(
    "--ranges", type=int, help="Defaults to one for each 20,000 keys."
)
_master = click.option("--master", help="Spark's master. Defaults to this machine.")
_conf = click.option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark; may be given more than once.",
)
_packed = click.option(
    "--packed",
    metavar="FILE",
    help="Send this file to the workers; `reexport pack` makes it.",
)
keep_option = click.option(
    "--keep",
    type=FiniteRange(min=0),
    default=KEEP,
    show_default=True,
    metavar="SECONDS",
    help="Keep Spark for so long while nothing is to be loaded.",
)
chunk_option = click.option(
    "--chunk", type=int, default=CHUNK, show_default=True, help="Keys in one job."
)
lag_option = click.option(
    "--watch-lag",
    "limit",
    metavar="GROUP:RECORDS",
    help="Pause while this group of the topic is further behind.",
)
watch_option = click.option(
    "--watch", is_flag=True, help="Show the progress until the end."
)


_parquet = click.option(
    "--parquet",
    metavar="PATH",
    help="Take the states from these files, with key, version and state.",
)
_csv = click.option(
    "--csv", metavar="PATH", help="The same from CSV with a line of names."
)


def file_options(command: _Command) -> _Command:
    """Take files with states, in one of two forms."""
    return _parquet(_csv(command))


def pace_options(command: _Command) -> _Command:
    """Take a rate, or hours of the day, with their zone."""
    return _rate(_window(_tz(command)))


class SparkOptions(TypedDict):
    """Spark as the options say; the parameters of every call that starts it."""

    master: str | None
    conf: dict[str, str]
    packed: str | None


def spark_options(command: Callable[..., None]) -> Callable[..., None]:
    """Take what Spark is started with, and pass it on as ``spark``.

    Raises:
        ReexportError: a setting is none, or no Spark is started.
    """

    @wraps(command)
    def run(
        *args: Any,
        master: str | None,
        conf: tuple[str, ...],
        packed: str | None,
        **others: Any,
    ) -> None:
        spark = SparkOptions(master=master, conf=read_conf(conf), packed=packed)
        if others.get("engine") == "sql" and any(spark.values()):
            raise ReexportError(
                "--engine sql starts no Spark: leave --master, --conf and --packed "
                "out, or the engine"
            )
        command(*args, spark=spark, **others)

    return _master(_conf(_packed(run)))


def engine_option(use: str) -> Callable[[_Command], _Command]:
    """Choose what does the work; ``use`` says what that is."""
    return click.option(
        "--engine",
        type=click.Choice(["spark", "sql"]),
        default="spark",
        show_default=True,
        help=use,
    )


def find_entity(path: str, name: str) -> tuple[App, Entity]:
    """Find an entity by its name, and the app that declares it.

    Raises:
        ReexportError: there is none.
    """
    app = load_app(path)
    if name not in app.entities:
        known = ", ".join(sorted(app.entities)) or "none"
        raise ReexportError(
            f"{path} declares no entity {name!r} (declared: {known}): declare it with "
            "@app.entity"
        )
    return app, app.entities[name]


def find_database(path: str, name: str) -> Database:
    """Find the database of an entity's app; see :func:`find_entity`."""
    return find_entity(path, name)[0].database()


def find_topic(app: App, path: str, name: str) -> Topic[Any]:
    """Find a topic by its name, declared or in Kafka.

    Raises:
        ReexportError: there is none.
    """
    found = [one for one in app.topics.values() if name in (one.declared, one.name)]
    if not found:
        known = ", ".join(sorted(one.declared for one in app.topics.values()))
        raise ReexportError(
            f"{path} declares no topic {name!r} (declared: {known}): declare it with "
            "app.topic"
        )
    return found[0]


def find_frame(parquet: str | None, csv: str | None) -> FrameSource | None:
    """Take the files that the options name; None for the entity's table.

    Raises:
        ReexportError: the options exclude each other.
    """
    if parquet is None and csv is None:
        return None
    if parquet is not None and csv is not None:
        raise ReexportError("the states have one source: either --parquet or --csv")
    if parquet is not None:
        return FrameSource.parquet(parquet)
    assert csv is not None
    return FrameSource.csv(csv)
