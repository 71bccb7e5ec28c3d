"""A mistake in a declaration is refused where it is made, with a way out."""

from __future__ import annotations

import functools
import inspect
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType
from uuid import UUID

import pytest

from jobs_lib import (
    App,
    ConfigurationError,
    Discard,
    Item,
    Job,
    Rate,
    Record,
    exponential,
)
from jobs_lib.backoff import Retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from jobs_lib import Job as Unseen

Customer = NewType("Customer", str)


class Colour(Enum):
    RED = 1


class Shade(StrEnum):
    DARK = "dark"


@pytest.fixture
def app() -> App:
    return App("shop")


def plain(job: Job, customer: str, order: int = 0) -> None: ...


def generates(job: Job) -> Iterator[None]:
    yield


async def generates_later(job: Job):
    yield


async def later(job: Job) -> None: ...


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


def decorate_async(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapped


class Mailer:
    def send(self, job: Job) -> None: ...

    @classmethod
    def make(cls, job: Job) -> None: ...

    @staticmethod
    def post(job: Job) -> None: ...


def no_job(customer: str) -> None: ...


def no_job_by_text(customer: "str") -> None: ...  # noqa: UP037


def no_parameter() -> None: ...


def only_keyword(*, job: Job) -> None: ...


def unannotated(job: Job, customer) -> None: ...


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (generates, "'generates' is a generator.*leave `yield` out"),
        (generates_later, "'generates_later' is a generator"),
        (decorate(later), "'later' is async, and the decorator around it is not"),
        (Mailer.send, "'send' is a method"),
        (vars(Mailer)["make"], "'make' is a classmethod of a class"),
        (vars(Mailer)["post"], "'post' is a staticmethod of a class"),
        (Mailer, "'Mailer' must be a function, and is a class"),
        (no_job, r"'no_job' takes \(customer.*write def no_job\(job: Job, customer"),
        (no_job_by_text, "the first parameter of a handler is the job"),
        (
            no_parameter,
            r"'no_parameter' takes \(\).*write def no_parameter\(job: Job\)",
        ),
        (only_keyword, "the first parameter of a handler is the job"),
        (unannotated, "'unannotated' takes 'customer' without an annotation"),
        (lambda job: None, r'no name of its own: give one, as in @app.job\(name="'),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:30],
)
def test_a_function_that_cannot_be_a_handler_is_refused_with_the_reason(
    app, function, says
):
    with pytest.raises(ConfigurationError, match=says):
        app.job()(function)
    assert not app.jobs


def by_name(job) -> None: ...


def by_text(job: "Unseen") -> None: ...  # noqa: UP037


def by_any(job: Any) -> None: ...


@pytest.mark.parametrize(
    "function", [plain, later, by_name, by_text, by_any, decorate_async(later)]
)
def test_every_kind_of_valid_handler_is_accepted(app, function):
    assert app.job(name="work")(function).is_async == inspect.iscoroutinefunction(
        function
    )


@pytest.mark.parametrize("decorator", ["job", "batch"])
def test_a_decorator_without_parentheses_is_refused(app, decorator):
    says = f"@app.{decorator} stands above plain without parentheses: write"
    with pytest.raises(ConfigurationError, match=says):
        getattr(app, decorator)(plain)
    with pytest.raises(ConfigurationError, match=r"@app.\w+\(name='charge'\)"):
        getattr(app, decorator)("charge")


@pytest.mark.guarantee("U4", "J8")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"retry": 0}, "the retry of 'plain' is 0: give exponential"),
        ({"retry": True}, "the retry of 'plain' is True"),
        ({"retry": "3"}, "the retry of 'plain' is '3'"),
        ({"rules": {ValueError: "discard"}}, "say 'discard' for ValueError: give Disc"),
        ({"rules": {"ValueError": Discard}}, "for 'ValueError', which is no class"),
        ({"rules": [ValueError]}, "the rules of 'plain' are"),
        ({"rate": 5}, r"the rate of 'plain' is 5.*Rate\(5, per=60\)"),
        ({"history": 0.5}, "the history of 'plain' is 0.5: give True, False"),
        ({"history": timedelta(-1)}, "the history of 'plain' is"),
        (
            {"history": timedelta(3_660, 1)},
            r"3660, seconds=1\): .* or how long .* 3,660 days at most",
        ),
        ({"name": ""}, "'' is no name for a job type"),
        ({"name": "no spaces"}, "'no spaces' is no name for a job type"),
        ({"name": 7}, "the name given to @app.job is 7"),
        ({"time_limit": "30"}, "the time_limit of 'plain' is '30': give seconds"),
        (
            {"time_limit": 0},
            "the time_limit of 'plain' is 0.*above 0 and at most 86,400",
        ),
        ({"time_limit": float("nan")}, "the time_limit of 'plain' is nan"),
        (
            {"last_only": True, "group": "customer", "debounce": -1},
            "the debounce of 'plain' is -1: give seconds, 0 or more",
        ),
        (
            {"last_only": True, "group": "customer", "max_wait": 0},
            "the max_wait of 'plain' is 0: give seconds, above 0",
        ),
        ({"discarded_is_done": 1}, "discarded_is_done of 'plain' is True or False"),
        ({"group": "custmer"}, "its parameter 'custmer', but the handler takes"),
        ({"group": 7}, "the group of 'plain' is 7: give the name of a parameter"),
        ({"group": lambda order: "x"}, "is called with all of the payload's fields by"),
        ({"group": later}, "the group function of 'plain' is async"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be_used_is_refused(app, arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        app.job(**arguments)(plain)
    assert not app.jobs


def test_a_number_as_a_policy_is_its_number_of_attempts(app):
    work = app.job(retry=3, rules={ValueError: 2})(plain)
    assert work.retry == Retry(max_attempts=3)
    assert work.rules == {ValueError: Retry(max_attempts=2)}


def take(annotation: Any) -> Callable[..., None]:
    def handler(job: Job, of: Any) -> None: ...

    handler.__annotations__["of"] = annotation
    return handler


@pytest.mark.guarantee("FJ12")
@pytest.mark.parametrize(
    "annotation",
    [float, bool, datetime, bytes, list[str], dict[str, int], Colour, str | float],
    ids=str,
)
def test_a_parameter_that_can_be_no_group_is_refused(app, annotation):
    says = (
        "its parameter 'of', which is .* and cannot be a group: annotate it as str, int"
    )
    with pytest.raises(ConfigurationError, match=says):
        app.job(name="work", group="of")(take(annotation))


@pytest.mark.parametrize(
    ("annotation", "value", "group"),
    [
        (str, "a", "a"),
        (int, -7, "-7"),
        (UUID, UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (int | None, None, None),
        (Customer, "c", "c"),
        (Annotated[int, "of"], 7, "7"),
        (Literal["x", "y"], "y", "y"),
        (Shade, Shade.DARK, "dark"),
        (Any, "z", "z"),
    ],
    ids=str,
)
def test_a_group_is_text_of_a_str_an_int_or_a_uuid(app, annotation, value, group):
    work = app.job(name="work", group="of")(take(annotation))
    by_function = app.job(name="other", group=lambda of: of)(take(annotation))
    for one in (work, by_function):
        assert one._group.choose({"of": value}) == group
        assert one._group.choose_many([{"of": value}] * 2) == [group] * 2


def handle(record: Record, conn: Any) -> None: ...


async def handle_later(record: Record, conn: Any) -> None: ...


def handle_one(record: Record) -> None: ...


def handle_more(record: Record, conn: Any, more: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            handle_one,
            r"is called with record and conn: write def handle_one\(record, c",
        ),
        (handle_more, "is called with record and conn"),
        (generates, "is a generator"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20],
)
def test_a_consumer_that_would_lose_its_records_is_refused(app, function, says):
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g")(function)
    app.consumer("orders", group="g")(handle)


def test_a_mapping_or_loader_with_other_parameters_is_refused(app):
    topic = app.topic("orders", compacted=True)
    model = app.read_model("orders", table="orders", key="id", group="g")
    for declare, called_with in (
        (model, "called with record:"),
        (app.entity(topic, source="orders", key="id"), "called with conn and keys"),
    ):
        with pytest.raises(ConfigurationError, match=called_with):
            declare(handle_more)
        with pytest.raises(ConfigurationError, match="is async"):
            declare(handle_later)


def test_hooks_with_other_parameters_are_refused(app):
    for declare in (app.enqueue_middleware, app.run_middleware):
        with pytest.raises(ConfigurationError, match="call_next"):
            declare(handle_more)


def test_a_batch_with_invalid_arguments_is_refused(app):
    def handle_items(items: list[Item[int]]) -> None: ...

    for arguments, says in (
        ({"size": "many"}, "a batch has 2 to 10,000 jobs, not 'many'"),
        ({"retry": "3"}, "the retry of 'handle_items' is '3'"),
        ({"history": 1}, "the history of 'handle_items' is 1"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            app.batch(**arguments)(handle_items)
    for unfit in ("after", "limit", "rate", "time_limit", "last_only", "debounce"):
        says = f"@app.batch takes no `{unfit}`: .* by @app.job"
        with pytest.raises(ConfigurationError, match=says):
            app.batch(**{unfit: [("payments", "relations")]})(handle_items)
    assert not app.jobs
    assert app.batch(retry=3)(handle_items).retry == exponential(max_attempts=3)
    assert app.job(rate=Rate(1))(plain).rate == Rate(1)


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ("charge", r"the aliases of 'plain' are 'charge': give a list of the type's"),
        ([7], r"the aliases of 'plain' are \[7\]: give a list"),
        (["no name"], "'no name' is no name for a job type"),
        (["plain"], "the job type 'plain' is declared twice"),
        (["charge", "charge"], "the job type 'charge' is declared twice"),
        (["later"], "the job type 'later' is declared twice"),
    ],
)
def test_aliases_that_are_no_other_names_are_refused(app, aliases, message):
    app.job()(later)
    with pytest.raises(ConfigurationError, match=message):
        app.job(aliases=aliases)(plain)


def test_a_type_is_not_declared_under_the_alias_of_another(app):
    app.job(aliases=["later"])(plain)
    with pytest.raises(ConfigurationError, match="'later' is declared twice"):
        app.job()(later)


NO_TOPIC = "is no name for a topic: give 1 to 249 letters, digits and"


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize("name", ["", " ", "bad topic!", ".", "..", 7, "x" * 250])
def test_a_name_that_no_topic_has_is_refused(app, name):
    for declare in (
        lambda: app.topic(name),
        lambda: app.consumer(name, group="g")(lambda record, conn: None),
        lambda: app.read_model(name, table="t", key="id", group="g")(lambda record: {}),
        lambda: App("shop", home=name),
    ):
        with pytest.raises(ConfigurationError, match=NO_TOPIC):
            declare()
    assert not app.topics
    assert not app.consumers


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize("name", ["", " shop", "two\nlines", None, 7, "x" * 201])
def test_a_name_that_is_empty_or_no_line_is_refused(app, name):
    with pytest.raises(ConfigurationError, match="no name for a consumer group: give"):
        app.consumer("orders", group=name)(lambda record, conn: None)
    with pytest.raises(ConfigurationError, match="is no name for an app: give 1 to"):
        App(name)


@pytest.mark.parametrize("partitions", [0, -1, "3", 1.5, True])
def test_partitions_that_are_no_number_are_refused(app, partitions):
    says = f"'orders' are {partitions!r}: give how many, 1 or more"
    with pytest.raises(ConfigurationError, match=says):
        app.topic("orders", partitions=partitions)


def test_an_entity_for_a_topics_name_instead_of_the_topic_is_refused(app):
    with pytest.raises(ConfigurationError, match="'orders': give what app"):
        app.entity("orders", source="orders", key="id")(lambda conn, keys: {})


@pytest.mark.parametrize(
    ("make", "values", "named", "message"),
    [
        (Rate, ("5",), {}, "a rate needs 1 to 1,000,000 starts .*starts='5'"),
        (Rate, (2.5,), {}, "a rate needs .*starts=2.5"),
        (Rate, (True,), {}, "a rate needs .*starts=True"),
        (Rate, (5,), {"per": "60"}, "a rate needs .*per='60'"),
        (exponential, (), {"first": "1"}, "policy needs numbers .*first='1'"),
        (exponential, (), {"cap": None}, "policy needs numbers .*cap=None"),
        (exponential, (), {"max_attempts": "3"}, "a number from 1 on, not '3'"),
        (exponential, (), {"max_attempts": 2.0}, "a number from 1 on, not 2.0"),
    ],
)
def test_a_rate_or_policy_of_an_invalid_number_is_refused(make, values, named, message):
    with pytest.raises(ValueError, match=message):
        make(*values, **named)


@pytest.mark.parametrize("given", [7, "", None])
def test_a_read_model_names_its_table_and_key_by_texts(app, given):
    for arguments in ({"table": given, "key": "id"}, {"table": "t", "key": given}):
        with pytest.raises(ConfigurationError, match=rf"is {given!r}: give its name"):
            app.read_model("orders", group="g", **arguments)
    assert not app.consumers


def test_a_schedule_has_texts_for_its_name_and_its_times(app):
    @app.job()
    def tick(job: Job) -> None: ...

    with pytest.raises(ConfigurationError, match="7 is no name for a schedule"):
        app.periodic("0 3 * * *", name=7)(tick)
    with pytest.raises(ConfigurationError, match="has the cron expression 3: give"):
        app.periodic(3)(tick)
