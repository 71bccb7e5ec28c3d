"""An application: everything that its decorators declare, without any connection.

Modules that connect are imported at their first use: psycopg and pydantic-settings take
0.2 s of CPU, and a module that only declares needs neither.
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from functools import cache
from typing import TYPE_CHECKING, Any, overload

from jobs_lib.consuming.circles import Circles
from jobs_lib.declaring import (
    JobDeclarations,
    StreamDeclarations,
    TopicDeclarations,
    TransactionDeclarations,
)
from jobs_lib.declaring.models import find_model, refuse_other_keys
from jobs_lib.declaring.names import check_name, check_topic_name
from jobs_lib.declaring.transactions import check_apart
from jobs_lib.errors import ConfigurationError
from jobs_lib.extras import require_driver
from jobs_lib.jobs.enqueue import Enqueuer
from jobs_lib.naming import check_once, check_told_once, check_unjoined, name_in_kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from contextlib import AbstractContextManager

    import psycopg

    from jobs_lib.callers.caller import AsyncCaller, Caller
    from jobs_lib.callers.pools import PooledTransaction, Pools
    from jobs_lib.consuming.answers import Answers
    from jobs_lib.consuming.transactional import Transactional
    from jobs_lib.jobs.waiting import Source
    from jobs_lib.kafka.dependencies import Dependency
    from jobs_lib.outbox.topic import Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.registry import Registry
    from jobs_lib.settings import Settings
    from jobs_lib.streams.stream import Stream


class App(
    JobDeclarations, TopicDeclarations, StreamDeclarations, TransactionDeclarations
):
    """The jobs, schedules, topics, streams, consumers and entities of one service.

    Args:
        name: the service's name in headers and logs. Each app on the same tables has
            a name of its own, and keeps it.
        home: the topic whose partitions are the origins of this service's groups: the
            topic whose records it handles. Defaults to none: processes share the
            origins by heartbeat, without Kafka.
        settings: defaults to the environment's, read at the first use.
    """

    def __init__(
        self, name: str, *, home: str | None = None, settings: Settings | None = None
    ) -> None:
        check_name(name, "an app")
        if isinstance(settings, str):
            raise ConfigurationError(
                f"the settings of the app {name!r} are a text: give "
                "jobs_lib.load_settings(database_url=…)"
            )
        if home is not None:
            check_topic_name(home)

        def read_settings() -> Settings:
            return self.settings

        streams: dict[str, Stream[Any]] = {}
        transactionals: list[Transactional] = []
        JobDeclarations.__init__(
            self,
            name,
            Enqueuer(self._load_queries, read_settings, self._explain_circle),
            read_settings,
        )
        TopicDeclarations.__init__(
            self,
            self._load_queries,
            read_settings,
            self.registry,
            self._declare_chunks,
            home,
            streams,
            transactionals,
        )
        StreamDeclarations.__init__(
            self,
            self._load_queries,
            read_settings,
            self.registry,
            self,
            self.topics,
            self.consumers,
            streams,
        )
        TransactionDeclarations.__init__(
            self, read_settings, self.registry, transactionals
        )
        self._settings = settings
        self._circles: Circles | None = None
        self._pools: Pools | None = None
        self._makes_pools = threading.Lock()
        self._found_registry: Registry | None = None

    @property
    def home(self) -> str | None:
        """The name in Kafka of the topic whose partitions are the origins."""
        return self._home and name_in_kafka(self.settings, self._home)

    @property
    def written(self) -> list[Topic[Any] | Stream[Any]]:
        """What the app writes to in Kafka: its topics, and its streams."""
        return [*self.topics.values(), *self.streams.values()]

    def names_in_kafka(self) -> set[str]:
        """The names in Kafka of the declared topics and groups.

        Raises:
            ConfigurationError: a name belongs to another environment, two names of a
                topic and group mean the same ones, consumers or jobs would wait
                for themselves or for each other, or one would join a group that tells
                how far another one is done, or that is another function's.
        """
        check_once([(one.topic, one.group) for one in self.consumers])
        # Declared anew: an enqueue may have asked too early.
        self._circles = Circles(self.consumers, self.jobs)
        self._circles.check()
        check_unjoined(
            {one.group for one in self.consumers},
            {one.done_group: one.group for one in self.consumers if one.done},
        )
        check_told_once(
            (topic, one.group) for one in self.consumers for topic in one.told_topics
        )
        check_apart(
            [one.group for one in self.transactionals],
            [one.group for one in self.consumers],
        )
        names = {one.name for one in self.written}
        names |= {name for one in self.consumers for name in (one.topic, one.group)}
        names |= {
            name for one in self.transactionals for name in (one.topic, one.group)
        }
        return names | ({self.home} if self.home else set())

    @property
    def settings(self) -> Settings:
        """The given settings, or the environment's."""
        if self._settings is not None:
            return self._settings
        return _load_reader()()

    def database(self) -> Database:
        """The service's database; connects when it is first used.

        Raises:
            ConfigurationError: no URL is set.
        """
        from jobs_lib.postgres.database import Database

        return Database.of(self.settings)

    def registry(self) -> Registry:
        """The schema registry; connects when it is first asked.

        Raises:
            ConfigurationError: none is set, or its client does not know a setting.
        """
        if self._found_registry is None:
            from jobs_lib.schemas.registry import Registry

            self._found_registry = Registry(self.settings)
        return self._found_registry

    def transaction(self) -> PooledTransaction:
        """A transaction for callers that have no transaction of their own.

        ``with app.transaction() as conn`` gives a psycopg connection of a pool, and
        ``async with`` an asynchronous one. The end of the block commits, an error in it
        rolls back.

        Raises:
            UnavailableError: on entering, when no connection is had within 30 s.
        """
        return self._find_pools().transaction()

    def alone(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A connection in autocommit mode.

        An app can stand for a connection: each enqueue or send by it is a transaction
        of its own, and takes one round trip.

        Raises:
            UnavailableError: on entering, when no connection is had within 30 s.
        """
        return self._find_pools().alone()

    @overload
    def reexport_changes(self, conn: Caller, entity: str, *, rate: int) -> int: ...

    @overload
    def reexport_changes(
        self, conn: AsyncCaller, entity: str, *, rate: int
    ) -> Coroutine[Any, Any, int]: ...

    def reexport_changes(
        self, conn: Caller | AsyncCaller, entity: str, *, rate: int
    ) -> int | Coroutine[Any, Any, int]:
        """Let the changes that follow in a transaction leave with a re-export.

        From here to the end of the transaction, changes of the entity's captured table
        and calls of ``send_current`` leave behind live records, at the re-export's
        rate. That is the entity's open re-export, or a new one. Returns its id; with
        an asynchronous connection, await it.

        Args:
            conn: the connection of the transaction, of any kind that ``enqueue`` takes.
            entity: its name.
            rate: records a minute of a new re-export; an open one keeps its own.

        Raises:
            ConfigurationError: the app declares no such entity.
            NoTransactionError: nothing would follow in this transaction.
            ReexportError: the rate is out of range.
        """
        from jobs_lib.reexport import give_changes

        if entity not in self.entities:
            known = ", ".join(sorted(self.entities)) or "none"
            raise ConfigurationError(
                f"the app {self.name!r} declares no entity {entity!r} (declared: "
                f"{known}): declare it with @app.entity"
            )
        return give_changes(conn, self._load_queries, self.entities[entity], rate)

    def answers(self, model: Callable[..., Any] | str) -> Answers:
        """Ask a read model of this app: how current it is, and for own writes.

        Args:
            model: the function below ``@app.read_model``, or the name of a table.

        Raises:
            ConfigurationError: no read model of this app is meant by it, or several; or
                the versions of its table have different keys.
        """
        from jobs_lib.consuming.answers import Answers

        declared = find_model(self.consumers, model)
        refuse_other_keys(self.consumers, declared)
        return Answers(declared, self._load_queries, lambda: self.settings)

    def close(self) -> None:
        """Close all open connections: to the database, to Kafka and to the registry.

        It waits for events that are under way. The next use opens them again.
        """
        self.close_streams()
        if self._pools is not None:
            self._pools.close()
        self.close_registry()

    def close_registry(self) -> None:
        """Close the connection to the schema registry; the next use opens one."""
        if self._found_registry is not None:
            self._found_registry.close()

    async def aclose(self) -> None:
        """As :meth:`close`, for the connections of the running event loop."""
        if self._pools is not None:
            await self._pools.aclose()

    def _find_pools(self) -> Pools:
        """The pools, made once at the first use, because :meth:`close` closes one."""
        if self._pools is None:
            from jobs_lib.callers.pools import Pools

            with self._makes_pools:
                if self._pools is None:
                    self._pools = Pools(lambda: self.settings)
        return self._pools

    def _explain_circle(
        self, after: Collection[Dependency], source: Source
    ) -> str | None:
        """Say how jobs would wait for themselves; None if they would not."""
        if self._circles is None:
            self._circles = Circles(self.consumers, self.jobs)
        return self._circles.explain(after, source)

    def _load_queries(self) -> Queries:
        from jobs_lib.postgres.queries import load_queries

        return load_queries(self.settings.schema_name)

    def _declare_chunks(self) -> None:
        """Declare the job type that loads a chunk of a re-export, once."""
        from jobs_lib.reexport import CHUNK_TYPE, chunk_handler
        from jobs_lib.reexport.chunks import STALE_TYPE, stale_handler

        if CHUNK_TYPE not in self.jobs:
            self.job(name=CHUNK_TYPE)(chunk_handler(self._load_queries))
            self.job(name=STALE_TYPE)(stale_handler(self._load_queries))


@cache  # every enqueue calls it, and a repeated import takes ten times as long
def _load_reader() -> Callable[[], Settings]:
    """The function that reads the environment's settings, imported at the first use."""
    from jobs_lib.settings import default_settings

    return default_settings


def load_app(path: str) -> App:
    """The app at ``module:attribute``, looked up from the working folder too.

    Raises:
        ConfigurationError: there is no such module or attribute, it is no App, or no
            database driver is installed.
    """
    require_driver()
    module_name, colon, attribute = path.partition(":")
    # A relative module has no package here that it could be relative to.
    if not colon or not module_name or not attribute or path.startswith("."):
        raise ConfigurationError(
            f"{path!r} names no app: write module:attribute, as in service:app"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _explain_missing(path, module_name, error) from None
    app = getattr(module, attribute, None)
    if not isinstance(app, App):
        raise ConfigurationError(
            f"{path!r} is {'missing' if app is None else 'no App'}: name the App of "
            f"{module_name}"
        )
    return app


def _explain_missing(
    path: str, module_name: str, error: ModuleNotFoundError
) -> ConfigurationError:
    """Which module is missing: the app's own, or one that it imports."""
    missing = error.name or str(error)
    if module_name == missing or module_name.startswith(f"{missing}."):
        return ConfigurationError(
            f"the module of {path!r} cannot be imported: {error}. Is it on the path, "
            "or in the working folder?"
        )
    # The frames of the import system itself have no file.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}"
    return ConfigurationError(
        f"the module of {path!r} is there, but {place} imports {missing!r}, which is "
        "not: install what it is part of, or correct the name"
    )
