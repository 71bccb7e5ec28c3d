"""Consumers and jobs of one app that would wait for each other for ever.

A consumer waits for the groups of its ``after``. A group ``<group>.done`` moves behind
its consumer, behind the jobs of that one's records, and behind the group of its
``derived_from``. Jobs wait for the groups of their type's ``after``. Where such steps
lead back to where they began, nothing ever moves.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.dependencies import Dependency

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.jobs.type import JobType
    from jobs_lib.jobs.waiting import Source


class _Jobs(NamedTuple):
    """The jobs of one type that come from the records of one consumer."""

    type: str
    topic: str
    group: str


_Node: TypeAlias = "Dependency | _Jobs"


class Circles:
    """Finds what waits for itself, among the consumers and job types of one app."""

    def __init__(
        self,
        consumers: Iterable[Subscription],
        jobs: Mapping[str, JobType[Any]],
    ) -> None:
        """Note what waits for what.

        Args:
            consumers: of the app.
            jobs: its job types by name; some have several names.
        """
        self._consumers = [*consumers]
        self._told = {one.done_group: one.group for one in self._consumers if one.done}
        """The groups that tell how far others are done, and of which ones."""
        self._waiting: dict[_Node, list[_Node]] = defaultdict(list)
        self._unsure: list[list[_Jobs]] = []
        """Jobs that come from one of some consumers: only the enqueue shows which."""
        self._explained: dict[tuple[object, ...], str | None] = {}
        for consumer in self._consumers:
            self._add_consumer(consumer)
        for name, after in {one.name: one.after for one in jobs.values()}.items():
            for topic in dict.fromkeys(one.topic for one in after):
                self._add_jobs(name, [one for one in after if one.topic == topic])

    def check(self) -> None:
        """Refuse consumers and job types that would wait for themselves.

        Raises:
            ConfigurationError: there are such ones, alone or in a circle.
        """
        for consumer in self._consumers:
            self._check_own(consumer)
        for one in [*self._waiting]:
            _refuse(self._find_path([one], one))
        for sources in self._unsure:
            circles = [self._find_circle(one) for one in sources]
            # Whoever enqueues them, they wait for themselves.
            if all(circles):
                _refuse(circles[0])

    def explain(self, after: Collection[Dependency], source: Source) -> str | None:
        """Say how jobs would wait for themselves; None if they would not.

        Args:
            after: what their type waits for.
            source: where they come from.
        """
        begin = tuple(one for one in after if one.topic == source.topic)
        key = (begin, source.group)
        if key not in self._explained:
            told = self._find_told(source.topic, source.group)
            path: Sequence[_Node] = ()
            if told is not None:
                path = [told] if told in begin else self._find_path(begin, told)
            self._explained[key] = " waits for ".join(map(_name, path)) or None
        return self._explained[key]

    def _add_consumer(self, consumer: Subscription) -> None:
        itself = Dependency(consumer.topic, consumer.group)
        self._waiting[itself] += consumer.after
        if not consumer.done:
            return
        told = Dependency(consumer.topic, consumer.done_group)
        self._waiting[told].append(itself)
        if (maker := consumer.derived_from) is not None:
            common = Dependency(maker.topic, consumer.done_group)
            self._waiting[common] += [told, maker]

    def _add_jobs(self, name: str, after: list[Dependency]) -> None:
        """Note what jobs of one type wait for if they come from one topic's records."""
        topic = after[0].topic
        sources = [
            _Jobs(name, topic, one.group)
            for one in self._consumers
            # A consumer has passed the record when the job is there.
            if one.topic == topic
            and _has_places(one)
            and {other.group for other in after} != {one.group}
        ]
        for jobs in sources:
            self._waiting[jobs] += after
        if len(sources) > 1:
            self._unsure.append(sources)
        elif sources and (told := self._find_told(topic, sources[0].group)):
            self._waiting[told].append(sources[0])

    def _check_own(self, consumer: Subscription) -> None:
        topic, group = consumer.topic, consumer.group
        for one in consumer.after:
            if self._told.get(one.group, one.group) == group:
                raise ConfigurationError(
                    f"the consumer of {topic!r} in the group {group!r} waits for its "
                    "own group, and would wait for ever: leave that one out of `after`"
                )
        maker = consumer.derived_from
        if maker is None:
            return
        # It may read that topic, too, and make these records of it.
        reads = any((one.topic, one.group) == maker for one in self._consumers)
        if maker.group == consumer.done_group or (maker.group == group and not reads):
            raise ConfigurationError(
                f"the consumer of {topic!r} in the group {group!r} says by "
                f"`derived_from` that {maker.group!r} makes its records, and that one "
                "waits for this consumer itself: name the group that reads "
                f"{maker.topic!r} and makes {topic!r} of it"
            )

    def _find_circle(self, jobs: _Jobs) -> list[_Node]:
        told = self._find_told(jobs.topic, jobs.group)
        path = told and self._find_path([jobs], told)
        return [told, *path] if told and path else []

    def _find_told(self, topic: str, group: str) -> Dependency | None:
        """Find what says how far a consumer is done, whether it is told or not."""
        for one in self._consumers:
            if (one.topic, one.group) == (topic, group):
                return Dependency(topic, one.done_group)
        return None

    def _find_path(self, begin: Collection[_Node], end: _Node) -> list[_Node]:
        """Find a way from one of some nodes to the end, by one step or more."""
        came_from: dict[_Node, _Node] = {}
        left = [*begin]
        while left:
            one = left.pop()
            for other in self._waiting.get(one, ()):
                if other == end:
                    path = [end, one]
                    while path[-1] not in begin:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if other not in came_from:
                    came_from[other] = one
                    left.append(other)
        return []


def _has_places(consumer: Subscription) -> bool:
    """Whether it may enqueue jobs that keep the places of its records."""
    model = consumer.model
    return model is None or (consumer.done and model.on_change is not None)


def _refuse(circle: Sequence[_Node]) -> None:
    if not circle:
        return
    jobs = [one for one in circle if isinstance(one, _Jobs)]
    if jobs and len({*circle}) == 2:
        (told,) = {*circle} - {*jobs}
        raise ConfigurationError(
            f"jobs of {jobs[0].type!r} come from the consumer of {jobs[0].topic!r} and "
            f"wait for {told.group!r}, which waits until they are done: leave that one "
            "out of `after`"
        )
    raise ConfigurationError(
        f"these wait for each other for ever: {' for '.join(map(_name, circle))}. "
        "Leave one of them out of the `after` or `derived_from` of another"
    )


def _name(node: _Node) -> str:
    if isinstance(node, _Jobs):
        return f"jobs of {node.type!r}"
    return f"{node.group!r} on {node.topic!r}"
