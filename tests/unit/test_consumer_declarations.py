"""A mistake in the declaration of a consumer is refused, with a way out."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from jobs_lib import App, ConfigurationError, Exact, Record
from jobs_lib.settings import load_settings


@pytest.fixture
def app() -> App:
    return App("shop")


def handle(record: Record, conn: Any) -> None: ...


def handle_block(records: list[Record], conn: Any) -> None: ...


def map_row(record: Record) -> dict[str, Any]:
    return {}


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"key_type": float}, "key_type of .*float.*: give str, bytes, int or UUID"),
        ({"key_type": "int"}, "key_type of .*'int': give str"),
        ({"block": 0}, "block of .* is 0: give the most records .* 1 to 10,000"),
        ({"block": 10_001}, "block of .* is 10001"),
        ({"block": 2.5}, r"block of .* is 2\.5"),
        ({"block": True}, "block of .* is True"),
        ({"block_seconds": 0}, "block_seconds of .* is 0: give seconds, above 0"),
        ({"block_seconds": "1"}, "block_seconds of .* is '1'"),
    ],
)
def test_values_that_no_consumer_has_are_refused(app, given, says):
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", **given)
    with pytest.raises(ConfigurationError, match=says):
        app.read_model("orders", table="t", key="id", group="g", **given)
    assert not app.consumers


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"per": "batch"}, "per of .* is 'batch': give 'record', or 'block'"),
        ({"timeout": 0}, "timeout of .* is 0: give seconds, above 0"),
        ({"timeout": float("nan")}, "timeout of .* is nan"),
        ({"type_header": ""}, "type_header of .* is '': give its name"),
        ({"type_field": 7}, "type_field of .* is 7: give its name"),
        (
            {"type_header": "event", "type_field": "kind"},
            "type_header='event' and type_field='kind'.*one place",
        ),
    ],
)
def test_values_that_no_handler_has_are_refused(app, given, says):
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", **given)
    assert not app.consumers


def test_a_handler_of_blocks_takes_records(app):
    says = r"is called with records and conn: write def map_row\(records, conn\)"
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", per="block")(map_row)
    app.consumer("orders", group="g", per="block")(handle_block)


@pytest.mark.guarantee("S7")
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            {"type_field": "kind"},
            {"type_header": "event"},
            "same place of the type, not its field kind and its header event",
        ),
        ({}, {"type_header": "event"}, "not its header ce_type and its header event"),
        ({"block": 5}, {}, "the same block, not 5 and None"),
        ({}, {"block_seconds": 2.0}, r"the same block_seconds, not None and 2\.0"),
        ({"done": True}, {}, "the same done, not True and False"),
    ],
)
def test_handlers_of_one_topic_and_group_agree(app, first, second, says):
    app.consumer("orders", group="g", type="placed", **first)(handle)
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", type="sent", **second)(handle)
    app.consumer("orders", group="g", type="sent", **first)(handle)
    # Another group is free to say something else.
    app.consumer("orders", group="other", type="sent", **second)(handle)


def test_sizes_of_blocks_are_those_of_the_declaration(app):
    app.consumer("orders", group="g", block=5, block_seconds=0.5)(handle)
    app.consumer("orders", group="by settings")(handle)
    app.read_model("orders", table="t", key="id", group="rm", block=7, key_type=UUID)(
        map_row
    )
    sizes = [(one.block, one.block_seconds) for one in app.consumers]
    assert sizes == [(5, 0.5), (None, None), (7, None)]


@pytest.mark.guarantee("W46")
@pytest.mark.parametrize("name", ["bad topic!", "", 7])
def test_an_exact_name_that_no_topic_has_is_refused(app, name):
    with pytest.raises(ConfigurationError, match="is no name for a topic"):
        app.consumer(Exact(name), group="g")(handle)
    with pytest.raises(ConfigurationError, match="no name for a consumer group"):
        app.consumer("orders", group=Exact("two\nlines"))(handle)


@pytest.mark.guarantee("W46")
def test_the_apps_own_topic_cannot_be_called_by_an_exact_name(app):
    says = r"Exact\('orders'\) is this app's own topic.*read it as 'orders'"
    app.topic("orders")
    with pytest.raises(ConfigurationError, match=says):
        app.consumer(Exact("orders"), group="g")(handle)
    with pytest.raises(ConfigurationError, match=says):
        app.read_model(Exact("orders"), table="t", key="id", group="g")(map_row)


@pytest.mark.guarantee("W46")
def test_a_topic_cannot_be_declared_that_is_called_by_an_exact_name(app):
    app.consumer(Exact("orders"), group="g")(handle)
    with pytest.raises(ConfigurationError, match="is this app's own topic"):
        app.topic("orders")


@pytest.mark.guarantee("W46")
def test_exact_names_stand_beside_those_of_the_environment():
    app = App(
        "shop",
        settings=load_settings(environment="dev", environments=["dev", "prod"]),
    )
    app.consumer(Exact("their.topic"), group=Exact("their-group"))(handle)
    app.consumer("ours", group="g")(handle)
    assert app.names_in_kafka() == {"their.topic", "their-group", "dev.ours", "dev.g"}


@pytest.mark.guarantee("W46")
@pytest.mark.parametrize("name", ["dev.orders", "prod.orders"])
def test_an_exact_name_of_an_environment_is_refused(name):
    app = App(
        "shop",
        settings=load_settings(environment="dev", environments=["dev", "prod"]),
    )
    app.consumer(Exact(name), group="g")(handle)
    with pytest.raises(ConfigurationError, match="declare it as 'orders'"):
        app.names_in_kafka()


@pytest.mark.guarantee("W46")
def test_two_declarations_that_are_one_in_kafka_are_refused():
    app = App("shop", settings=load_settings())
    app.consumer("orders", group="g")(handle)
    app.consumer(Exact("orders"), group="g")(handle)
    says = "two consumers read the topic 'orders' in the group 'g'"
    with pytest.raises(ConfigurationError, match=says):
        app.names_in_kafka()


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("done", ["yes", 1, None])
def test_a_done_that_is_none_of_its_values_is_refused(app, done):
    says = f"done of .*'orders'.* is True, False or 'sent', not {done!r}"
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", done=done)(handle)
    with pytest.raises(ConfigurationError, match=says):
        app.read_model("orders", table="t", key="id", group="rm", done=done)(map_row)


@pytest.mark.guarantee("K5")
@pytest.mark.parametrize(
    ("derived_from", "done", "says"),
    [
        (
            "payments",
            True,
            "give the topic that the records are made of, and the group",
        ),
        (("payments",), True, "give the topic that the records are made of"),
        (("payments", 1), "sent", "give the topic that the records are made of"),
        (("pay ments", "g"), True, "'pay ments' is no name for a topic"),
        (("payments", ""), True, "'' is no name for a consumer group"),
        (
            ("orders", "maker.done"),
            True,
            "'orders', which cannot be derived from itself",
        ),
        (("payments", "maker.done"), False, "add done=True"),
    ],
)
def test_a_topic_cannot_be_derived_from_something_else(app, derived_from, done, says):
    told = {"done": done, "derived_from": derived_from}
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", **told)(handle)
    with pytest.raises(ConfigurationError, match=says):
        app.read_model("orders", table="t", key="id", group="rm", **told)(map_row)


@pytest.mark.guarantee("K5")
def test_one_group_is_told_one_offset_of_a_topic():
    app = App("shop", settings=load_settings())
    derived: dict[str, Any] = {"done": True, "derived_from": ("payments", "maker.done")}
    app.consumer("transfers", group="g", **derived)(handle)
    app.names_in_kafka()
    app.consumer("refunds", group="other", **derived)(handle)
    app.names_in_kafka()
    app.consumer("payments", group="g", done=True)(handle)
    says = "two consumers in the group 'g' say how far it is done with the topic 'paym"
    with pytest.raises(ConfigurationError, match=says):
        app.names_in_kafka()


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("template", ["{environment}.{name}", "{name}.{environment}"])
@pytest.mark.parametrize("exact", [False, True])
def test_others_name_the_group_that_tells_by_the_environments_template(template, exact):
    settings = load_settings(environment="dev", topic_template=template)
    own, told = (Exact("g"), Exact("g.done")) if exact else ("g", "g.done")
    app = App("shop", settings=settings)
    app.consumer("orders", group=own, done=True)(handle)
    other = App("detection", settings=settings)
    other.consumer("orders", group="h", after=[("orders", told)])(handle)
    (tells,), (waits,) = app.consumers, other.consumers
    assert [one.group for one in waits.after] == [tells.done_group]


@pytest.mark.guarantee("K22")
def test_a_group_that_tells_how_far_another_is_done_cannot_be_joined():
    app = App("shop", settings=load_settings())
    app.consumer("orders", group="g", done=True)(handle)
    app.consumer("others", group="g.done")(handle)
    says = "in the group 'g.done', which tells how far 'g' is done"
    with pytest.raises(ConfigurationError, match=says):
        app.names_in_kafka()
