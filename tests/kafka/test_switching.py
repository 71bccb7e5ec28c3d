"""A version of a read model is filled beside another one, and takes its place."""

from __future__ import annotations

import json
import re
import threading
from unittest.mock import Mock
from uuid import UUID, uuid4

import psycopg
import pytest

from jobs_lib import ConfigurationError, telemetry
from jobs_lib.consuming import resync as module
from jobs_lib.consuming import versions
from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.offsets import Offsets
from jobs_lib.consuming.resync import Resync
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.client import read_topic_ids
from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.topic_settings import delete_before
from jobs_lib.operating import dropping, session, switching
from jobs_lib.operating.dropping import drop_version
from jobs_lib.operating.read_models import list_read_models
from jobs_lib.operating.rewinds import replay
from jobs_lib.operating.session import IdleError, LockedError
from jobs_lib.operating.switching import switch
from jobs_lib.operating.where import where
from jobs_lib.service.resync import cancel_resync, find_model_of, resync
from tests.support.apps import heard, running
from tests.support.records import make_producer

pytestmark = pytest.mark.expects("origins.lost", "fenced")
KEYS = 40


@pytest.fixture
def name(request, topic, bootstrap_servers):
    """A topic of two partitions with forty keys."""
    policy = getattr(request, "param", "compact")
    name = topic(2, config={"cleanup.policy": policy})
    send(bootstrap_servers, name, range(KEYS), 1)
    return name


def send(bootstrap_servers: str, topic: str, keys, version: int) -> None:
    """Send a state of each key, another one in each version."""
    producer = make_producer(bootstrap_servers)
    for n in keys:
        value = json.dumps({"n": n + 1000 * (version - 1)}).encode()
        header = ("ce_version", str(version))
        producer.produce(topic, value, f"k{n}", headers=[header])
    assert producer.flush(30) == 0


@pytest.fixture
def tables(admin):
    """The tables of two versions, of which the second has another column."""
    admin.execute(
        "create table state_rm (id text primary key, version bigint, n int);"
        "create table state_v2_rm"
        " (id text primary key, version bigint, n int, twice int);"
        "create table effects (of int, key text, record int)"
    )


@pytest.fixture
def declare(make, tables, name):
    """A function that makes an app with these versions of a read model."""

    def declare(*versions: int | None, gates=None, side=False, **more):
        app = make(heartbeat_interval=0.3, stale_after=5.0)
        for version in versions:
            number = version or 1

            def tell(records, conn, number=number) -> None:
                for one in records:
                    conn.execute(
                        "insert into effects values (%s, %s, %s)",
                        (number, one.key, one.version),
                    )

            def row(record, number=number):
                if gates and number in gates:
                    gates[number].wait(30)
                n = record.value["n"]
                return {"n": n} if number == 1 else {"n": n, "twice": 2 * n}

            app.read_model(
                name,
                table="state_rm",
                key="id",
                group=name,
                version=version,
                on_change=tell,
                versions="side" if side else None,
                **more,
            )(lambda record, row=row: row(record))
        return app

    return declare


@pytest.fixture
def read(admin):
    """A function that reads what a table holds."""

    def read(table: str = "state_rm", columns: str = "id, n"):
        rows = admin.execute(f"select {columns} from {table}")
        return {key: tuple(rest) for key, *rest in rows.fetchall()}

    return read


@pytest.fixture
def read_places(admin):
    """A function that reads the offsets of a group, by partition."""

    def read_places(group: str) -> dict[int, int]:
        rows = admin.execute(
            "select partition, next_offset from jobs_lib.offsets"
            " where consumer_group = %s order by 1",
            (group,),
        )
        return dict(rows.fetchall())

    return read_places


DEPENDENTS = {
    "function many()": """
        create function many() returns bigint
        begin atomic select count(*) from state_rm; end
    """,
    "policy sees of effects": """
        create policy sees on effects
            using (exists (select from state_rm where id = key))
    """,
    "publication states": "create publication states for table state_rm",
}
"""What goes on to use a table, and how it is made."""
FIRST = {f"k{n}": (n,) for n in range(KEYS)}
SECOND = {f"k{n}": (n, 2 * n) for n in range(KEYS)}


def is_filled(read, table: str) -> bool:
    return {*read(table)} >= FIRST.keys()


@pytest.mark.guarantee("W82")
@pytest.mark.parametrize("side", [False, True], ids=["on the row", "beside"])
def test_a_version_is_filled_beside_the_current_one_and_takes_its_place(
    declare, read, admin, name, bootstrap_servers, wait_for, side
):
    app = declare(None, 2, side=side)
    with running(app, "consumers") as service:
        wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="it is full")
        wait_for(
            lambda: is_filled(read, "state_rm"), timeout=60, what="so is the first"
        )
        wait_for(lambda: service.is_ready, timeout=30, what="it is ready")
        assert read() == FIRST
        # Only the version that readers see has effects.
        assert {of for of, *_ in admin.execute("select of from effects")} == {1}
        done = switch(app, "state_rm", 2)
        assert (done.table, done.before, done.after) == ("state_rm", 1, 2)
        assert read(columns="id, n, twice") == SECOND
        assert read("state_v1_rm") == FIRST
        # Both go on: the old one for those who want to go back.
        send(bootstrap_servers, name, range(KEYS), 2)
        for place, model in (("state_rm", "state_v2_rm"), ("state_v1_rm", "state_rm")):
            query = (
                "select from jobs_lib.model_keys where version = 2 and model = '{1}'"
                if side
                else "select from {0} where version = 2"
            ).format(place, model)
            wait_for(
                lambda query=query: admin.execute(query).rowcount == KEYS,
                timeout=60,
                what=f"{place} goes on",
            )
        parts = {
            (one.table, one.version, one.current, one.group)
            for one in list_read_models(app)
        }
        assert parts == {
            ("state_rm", 2, True, f"{name}.v2"),
            ("state_v1_rm", 1, False, name),
        }
        assert find_model_of(app, "state_v1_rm").version.number == 1
        effects = admin.execute(
            "select of, record, count(*) from effects group by 1, 2"
        )
        assert sorted(effects.fetchall()) == [(1, 1, KEYS), (2, 2, KEYS)]
        switch(app, "state_rm", 1)
        now = {key: n + 1000 for key, (n,) in FIRST.items()}
        assert read() == {key: (n,) for key, n in now.items()}
        found = read("state_v2_rm", "id, n, twice")
        assert found == {key: (n, 2 * n) for key, n in now.items()}


@pytest.mark.guarantee("W82")
def test_partitions_that_the_topic_has_no_more_keep_no_version_back(
    declare, read, admin, name, make_anew, bootstrap_servers, wait_for
):
    with running(declare(1), "consumers"):
        wait_for(lambda: is_filled(read, "state_rm"), timeout=60, what="it is full")
    # With one partition instead of two.
    make_anew(name)
    send(bootstrap_servers, name, range(KEYS), 2)
    app = declare(1, 2)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            query = f"select from {table} where version = 2"
            wait_for(
                lambda query=query: admin.execute(query).rowcount == KEYS,
                timeout=60,
                what=f"{table} has all",
            )
        assert switch(app, "state_rm", 2).after == 2


@pytest.mark.guarantee("W82")
def test_no_reader_sees_a_gap_and_each_record_has_its_effect_once(
    declare, read, admin, connect, name, bootstrap_servers, wait_for
):
    app = declare(1, 2)
    stop, seen, errors = threading.Event(), [], []

    def look() -> None:
        with connect() as connection:
            connection.autocommit = True
            try:
                while not stop.is_set():
                    row = connection.execute(
                        "select count(*), count(to_jsonb(s) ->> 'twice')"
                        " from state_rm s"
                    ).fetchone()
                    seen.append(row)
            except Exception as error:
                errors.append(error)

    versions = iter(range(2, 10_000))

    def write() -> None:
        while not stop.is_set():
            send(bootstrap_servers, name, range(KEYS), next(versions))

    with running(app, "consumers"):
        wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="it is full")
        wait_for(
            lambda: is_filled(read, "state_rm"), timeout=60, what="so is the first"
        )
        threads = [threading.Thread(target=look), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: seen, timeout=60, what="the reader reads")
            for version in (2, 1, 2):
                switch(app, "state_rm", version)
                before = len(seen)
                wait_for(
                    lambda n=before: len(seen) > n + 1, timeout=60, what="it reads on"
                )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        last = next(versions) - 1
        query = "select count(*) from {} where version = %s"
        for table in ("state_rm", "state_v1_rm"):
            wait_for(
                lambda table=table: (
                    admin.execute(query.format(table), (last,)).fetchone() == (KEYS,)
                ),
                timeout=60,
                what=f"{table} has the last records",
            )
    assert not errors
    # All keys at any time, and of one version: never a mixture.
    assert {*seen} == {(KEYS, 0), (KEYS, KEYS)}
    found = admin.execute(
        "select key, record, count(*) from effects group by 1, 2 having count(*) > 1"
    ).fetchall()
    assert found == [], "an effect that came twice"
    ends = admin.execute("select max(record), count(distinct key) from effects")
    assert ends.fetchone() == (last, KEYS)
    # Blocks tell of the last record of each key alone; the last of all is never passed.
    row = admin.execute("select count(*) from effects where record = %s", (last,))
    assert row.fetchone() == (KEYS,)


@pytest.mark.guarantee("W82")
def test_the_old_version_tells_what_lies_before_the_mark_of_the_new_one(
    declare, read, admin, name, bootstrap_servers, wait_for, gate
):
    gates = {1: threading.Event()}
    gates[1].set()
    app = declare(1, 2, gates=gates)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        # From here on the first version is held up, and the second one is not.
        gates[1].clear()
        send(bootstrap_servers, name, range(KEYS), 2)
        query = "select count(*) from state_v2_rm where version = 2"
        wait_for(
            lambda: admin.execute(query).fetchone() == (KEYS,),
            timeout=60,
            what="the second one is ahead",
        )
        assert switch(app, "state_rm", 2).untold == KEYS
        with pytest.raises(
            OperatingError, match=f"{KEYS} offsets left of which it alone calls"
        ):
            drop_version(declare(2), "state_rm", 1)
        send(bootstrap_servers, name, range(KEYS), 3)
        gates[1].set()
        effects = "select of, record, count(*) from effects group by 1, 2"
        wait_for(
            lambda: (
                sorted(admin.execute(effects).fetchall())
                == [(1, 1, KEYS), (1, 2, KEYS), (2, 3, KEYS)]
            ),
            timeout=60,
            what="each record has had its effect",
        )
        with pytest.raises(OperatingError, match="these pods still keep version 1"):
            drop_version(declare(2), "state_rm", 1)


@pytest.mark.guarantee("W82")
def test_the_old_version_tells_of_a_partition_that_it_has_not_taken_yet(
    declare, read, admin, name, wait_for
):
    with running(declare(1), "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
    with running(declare(2), "consumers"):
        wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="it is full")
    # As if only the new version had heard of this partition.
    admin.execute(
        "delete from jobs_lib.offsets where partition = 1 and consumer_group = %s",
        (name,),
    )
    found = "select next_offset from jobs_lib.offsets where partition = 1"
    (end,) = admin.execute(found).fetchone()
    assert switch(declare(1, 2), "state_rm", 2).untold == end
    with pytest.raises(OperatingError, match=f"{end} offsets left"):
        drop_version(declare(2), "state_rm", 1)
    places = drop_version(declare(2), "state_rm", 1, loses_effects=True)
    assert places == ["state_v1_rm"]


@pytest.mark.guarantee("W82")
def test_the_old_version_tells_of_a_partition_that_it_takes_during_the_switch(
    declare, read, admin, database, name, wait_for, monkeypatch
):
    with running(declare(1, 2), "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
    forget = "delete from jobs_lib.offsets where partition = 1 and consumer_group = %s"
    admin.execute(forget, (name,))
    waiting = (
        "select from pg_stat_activity"
        " where application_name = 'jobs_lib switch' and wait_event_type = 'Lock'"
    )
    rename = switching._rename
    taken = {"group": name, "topics": [name], "partitions": [1]}
    threads = []

    def take_meanwhile(*of) -> None:
        has_row = threading.Event()

        def take() -> None:
            with database.connect("take") as connection, connection.transaction():
                connection.execute(database.queries["make_offsets"], taken)
                has_row.set()
                wait_for(lambda: admin.execute(waiting).rowcount, what="it waits")

        threads.append(threading.Thread(target=take))
        threads[-1].start()
        assert has_row.wait(60)
        rename(*of)

    monkeypatch.setattr(switching, "_rename", take_meanwhile)
    monkeypatch.setattr(switching, "_LOCK_SECONDS", 60.0)
    monkeypatch.setattr(switching, "_IDLE_SECONDS", 60.0)
    found = "select next_offset from jobs_lib.offsets where partition = 1"
    (end,) = admin.execute(found).fetchone()
    untold = switch(declare(1, 2), "state_rm", 2).untold
    for thread in threads:
        thread.join()
    assert untold == end


@pytest.mark.guarantee("W82", "W64")
def test_a_resync_that_begins_as_the_tables_change_their_names_is_refused(
    declare, read, admin, database, wait_for, monkeypatch
):
    both, again = declare(1, 2), declare(1)
    with running(both, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
    work = Resync(again.settings, database, find_model_of(again, "state_rm"))

    def switch_meanwhile(*given):
        switch(both, "state_rm", 2)
        return read_topic_ids(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_topic_ids", switch_meanwhile)
        with pytest.raises(OperatingError, match=r"another version of state_rm .* now"):
            work.begin()
    assert admin.execute("select from jobs_lib.resyncs").rowcount == 0
    work = Resync(again.settings, database, find_model_of(again, "state_v1_rm"))
    assert work.begin()


@pytest.mark.guarantee("W82", "W64")
def test_a_cancelled_resync_that_goes_on_writes_no_other_version(
    declare, read, admin, database, wait_for, gate
):
    both = declare(1, 2)
    again = declare(1, gates={1: gate})
    with running(both, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        work = Resync(again.settings, database, find_model_of(again, "state_rm"))
        assert work.begin()
        again.consumers[:] = [work.make_subscription()]
        owned = "select from jobs_lib.origins where role = %s and owner is not null"
        role = (f"consume:{work.group}",)
        with running(again, "consumers"):
            wait_for(
                lambda: admin.execute(owned, role).rowcount == 2,
                timeout=60,
                what="it reads",
            )
            cancel_resync(both, "state_rm")
            switch(both, "state_rm", 2)
            # What the first version writes has no `twice`.
            admin.execute("update state_rm set n = -1, twice = -1")
            refused = []
            forget = telemetry.listen(
                lambda _, fields: refused.append(fields["error"]), ["loop.failed"]
            )
            gate.set()
            wrong = "select from state_rm where n <> -1"
            wait_for(
                lambda: refused or admin.execute(wrong).rowcount,
                timeout=60,
                what="its block is over",
            )
            forget()
        found = {*read(columns="id, n, twice").values()}
        # It tells whose rows there are, and what may have let them in.
        kept = [
            admin.execute(f"select * from jobs_lib.{one}").fetchall()
            for one in ("resyncs", "origins", "offsets", "read_models")
        ]
        assert found == {(-1, -1)}, (refused, kept)
        assert all("no longer owned" in one for one in refused)


@pytest.fixture
def lose_answers(monkeypatch):
    """A function; then the answer that a new topic has begun is lost, once for each."""
    advance, lost = Offsets.advance, set()

    def advance_and_lose(self, connection, progress, following, *more) -> None:
        advance(self, connection, progress, following, *more)
        place = (self._group, progress.partition)
        if following == 0 and place not in lost:
            lost.add(place)
            connection.close()
            raise psycopg.OperationalError("the connection is lost")

    return lambda: monkeypatch.setattr(Offsets, "advance", advance_and_lose)


@pytest.mark.guarantee("W82")
@pytest.mark.parametrize("commit", ["answered", "unanswered"])
def test_the_current_version_tells_of_all_that_a_topic_has_that_was_made_anew(
    declare, read, admin, name, make_anew, bootstrap_servers, wait_for, lose_answers,
    commit
):  # fmt: skip
    app = declare(1, 2)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        switch(app, "state_rm", 2)
    make_anew(name)
    send(bootstrap_servers, name, range(KEYS), 2)
    if commit == "unanswered":
        lose_answers()
    with heard("loop.failed") as failed, running(declare(1, 2), "consumers"):
        for table in ("state_rm", "state_v1_rm"):
            query = f"select from {table} where version = 2"
            wait_for(
                lambda query=query: admin.execute(query).rowcount == KEYS,
                timeout=60,
                what=f"{table} has all",
            )
    effects = "select of, record, count(*) from effects group by 1, 2"
    found = sorted(admin.execute(effects).fetchall())
    assert found == [(1, 1, KEYS), (2, 2, KEYS)]
    assert bool(failed) is (commit == "unanswered")


@pytest.mark.guarantee("W82")
def test_a_switch_that_cannot_be_is_refused_and_changes_nothing(
    declare, read, admin, connect, gate, wait_for
):
    app = declare(1, 2, gates={2: gate})

    def refused(match: str, version: int = 2, patience: float = 0.5) -> None:
        with pytest.raises(OperatingError, match=match):
            switch(app, "state_rm", version, patience=patience)
        assert read() == FIRST

    with running(app, "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
        refused("version 2 of state_rm is 40 offsets behind: wait until")
        refused("readers see version 1 of state_rm already", version=1)
        refused("no version 3 of 'state_rm'; of this table it has: 1, 2", version=3)
        gate.set()
        wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="it is full")
        admin.execute("create view seen as select * from state_rm")
        refused("the view seen would go on to use version 1", patience=20)
        admin.execute(
            "drop view seen; create table refers (id text references state_rm)"
        )
        refused("the foreign key refers_id_fkey of refers would", patience=20)
        admin.execute("drop table refers")
        for one, made in DEPENDENTS.items():
            admin.execute(made)
            refused(f"^{re.escape(f'the {one} would go on')}", patience=20)
            admin.execute(f"drop {one.replace(' of ', ' on ')}")
        admin.execute(
            "insert into jobs_lib.resyncs (model, topic,"
            " consumer_group, begins, notes) values ('state_v2_rm', 't', 'g', '', 3)"
        )
        refused("a re-synchronisation of state_v2_rm goes on", patience=20)
        admin.execute(
            "delete from jobs_lib.resyncs; create table state_v1_rm (id text)"
        )
        refused('"state_v1_rm" already exists', patience=20)
        admin.execute(
            "drop table state_v1_rm; alter table state_rm enable row level security"
        )
        refused("policies say who may read which rows of state_rm", patience=20)
        admin.execute("alter table state_rm disable row level security")
        with connect() as reader:
            reader.execute("select from state_rm")
            refused(
                "others have held locks on the tables of state_rm for 2 s", patience=2
            )
        with pytest.raises(OperatingError, match="still declares version 1"):
            drop_version(app, "state_rm", 1)
        with pytest.raises(
            OperatingError, match="no version 7 of 'state_rm', but: 1, 2"
        ):
            drop_version(app, "state_rm", 7)
        switch(app, "state_rm", 2)
        assert read(columns="id, n, twice") == SECOND


class Broken(threading.Event):
    """A gate at which every record fails until it is open."""

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            raise LookupError("no seats")
        return True


@pytest.mark.guarantee("W82", "W71")
def test_a_version_that_has_skipped_what_the_current_one_has_not_is_refused(
    declare, read, admin, database, name, wait_for
):
    gate = Broken()
    app = declare(1, 2, gates={2: gate}, on_error="skip")
    group = f"{name}.v2"
    counted = "select from jobs_lib.skipped where consumer_group = %s"
    with running(app, "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
        wait_for(
            lambda: admin.execute(counted, (group,)).rowcount == KEYS,
            timeout=60,
            what="the second one has skipped all",
        )
        told = f"skipped {KEYS} records that version 1 .* offset 0 of {name}/0: Lookup"
        with pytest.raises(OperatingError, match=f"{told}.*--group {group}`, or"):
            switch(app, "state_rm", 2)
        assert read() == FIRST
        assert switch(app, "state_rm", 2, with_skipped=True).after == 2
        # The first one has skipped less.
        assert switch(app, "state_rm", 1).after == 1
        gate.set()
        back = replay(app.settings, database, group, name)
        assert (sum(one.skipped for one in back), {one.after for one in back}) == (
            KEYS,
            {0},
        )
        wait_for(
            lambda: admin.execute(counted, (group,)).rowcount == 0,
            timeout=60,
            what="all are applied",
        )
        switch(app, "state_rm", 2)
        assert read(columns="id, n, twice") == SECOND


@pytest.mark.guarantee("W82")
def test_only_records_of_this_topic_that_the_current_version_has_make_a_gap(
    database, admin
):
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, topic_id)"
        " values ('new', 't', 0, %s)",
        (UUID(int=2),),
    )
    admin.execute(
        "insert into jobs_lib.skipped"
        " (consumer_group, topic, partition, record_offset, topic_id, error)"
        " select consumer, 't', 0, place, id, 'it failed'"
        " from unnest('{new,new,old,new,old,new}'::text[], '{1,2,2,3,3,4}'::int[],"
        " %s::uuid[]) as of(consumer, place, id)",
        ([UUID(int=n) for n in (1, 2, 2, 2, 1, 2)],),
    )
    asked = {"before": "old", "group": "new", "topic": "t"}
    with database.connect("test") as connection:
        row = connection.execute(database.queries["find_skipped_alone"], asked)
        assert row.fetchall() == [(0, 3, "it failed", 2)]


@pytest.mark.guarantee("W82")
@pytest.mark.parametrize("name", ["compact,delete"], indirect=True)
def test_records_that_are_gone_from_the_topic_keep_no_version_back(
    declare, read, admin, name, database, wait_for
):
    first = declare(1)
    with running(first, "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
    # All but the last record of the second partition.
    ends = find_places(first.settings, name, "end")
    delete_before(first.settings, name, {0: ends[0], 1: ends[1] - 1})
    app = declare(1, 2)
    with running(app, "consumers"):
        assert switch(app, "state_rm", 2).after == 2
        assert len(read()) == 1
    # What was set back since it had reached the end has not reached it.
    admin.execute(
        "update jobs_lib.offsets set next_offset = 1"
        " where partition = 1 and consumer_group = %s",
        (f"{name}.v2",),
    )
    asked = {
        "before": name,
        "group": f"{name}.v2",
        "topic": name,
        "partitions": [0, 1],
        "stored": [0, ends[1]],
        "reached": [ends[0], ends[1]],
    }
    with database.connect("test") as connection:
        found = connection.execute(database.queries["find_behind"], asked).fetchone()
    assert found == (ends[1] - 1,)


@pytest.mark.guarantee("W82")
def test_readers_do_not_wait_for_a_process_that_stands_still_in_a_switch(
    declare, read, connect, wait_for, monkeypatch
):
    app = declare(1, 2)
    rename = switching._rename
    seen: list[object] = []

    def stand_still(connection, *versions) -> None:
        if not seen:
            # The table is locked, and this process does nothing until it is free.
            with connect() as reader:
                reader.execute("set lock_timeout = '20s'")
                row = reader.execute("select count(n) from state_rm").fetchone()
                seen.append(row)
        rename(connection, *versions)

    monkeypatch.setattr(switching, "_rename", stand_still)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        with pytest.raises(IdleError, match="stood still for 1 s, and the server has"):
            switch(app, "state_rm", 2, patience=0)
        assert (seen, read()) == ([(KEYS,)], FIRST)
        # A try that was ended so is repeated.
        seen.clear()
        switch(app, "state_rm", 2)
        assert read(columns="id, n, twice") == SECOND


@pytest.mark.guarantee("W82")
def test_a_partition_that_is_taken_during_a_switch_gets_the_names_behind_it(
    declare, read, admin, database, name, wait_for, monkeypatch
):
    app = declare(1, 2)
    first, _ = declare(1, 2).consumers
    # It has got a partition of which its group knows nothing.
    consumer = Consumer(
        database,
        Mock(group=name),
        [first],
        uuid4(),
        block=1,
        block_seconds=1.0,
        prefetch_bytes=1,
        heartbeat=1.0,
        topic_ids=Mock(read=lambda _: {}),
    )
    rename = switching._rename
    placed: list[str] = []

    def take() -> None:
        consumer.take({f"{name}/2": 1})
        placed.append(first.tables[0].name)

    taking = threading.Thread(target=take)
    waiting = (
        "select from pg_stat_activity"
        " where application_name like '%%' || %s and wait_event_type = 'Lock'"
    )

    def take_meanwhile(connection, *of) -> None:
        # The switch has locked the partitions that it knows of.
        taking.start()
        wait_for(
            lambda: placed or admin.execute(waiting, (f"consume {name}",)).rowcount,
            timeout=60,
            what="it waits",
        )
        rename(connection, *of)

    monkeypatch.setattr(switching, "_rename", take_meanwhile)
    monkeypatch.setattr(switching, "_IDLE_SECONDS", 60.0)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
    switch(app, "state_rm", 2)
    taking.join()
    assert placed == ["state_v1_rm"]


@pytest.mark.guarantee("W82")
def test_a_version_that_falls_behind_in_the_last_moment_is_waited_for(
    declare, read, gate, wait_for, monkeypatch
):
    app = declare(1, 2, gates={2: gate})
    monkeypatch.setattr(switching, "_await_ends", lambda *_: [])
    with running(app, "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
        with pytest.raises(OperatingError, match="40 offsets behind"):
            switch(app, "state_rm", 2, patience=0.5)
        assert read() == FIRST
        gate.set()
        switch(app, "state_rm", 2)
        assert read(columns="id, n, twice") == SECOND


@pytest.mark.guarantee("W82")
def test_a_switch_waits_for_a_version_whose_process_has_not_started_yet(
    declare, read, wait_for
):
    with running(declare(None), "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
    app = declare(None, 2)
    switched: list[str] = []
    thread = threading.Thread(
        target=lambda: switched.append(switch(app, "state_rm", 2).table)
    )
    thread.start()
    with running(declare(None, 2), "consumers"):
        thread.join(60)
        assert switched == ["state_rm"]
        assert read(columns="id, n, twice") == SECOND


@pytest.mark.guarantee("W82")
def test_a_version_of_another_topic_must_have_reached_its_end(
    declare, read, topic, bootstrap_servers, gate, wait_for
):
    other = topic(1, config={"cleanup.policy": "compact"})
    send(bootstrap_servers, other, range(7), 1)
    app = declare(1)

    @app.read_model(other, table="state_rm", key="id", group=other, version=2)
    def row(record):
        gate.wait(30)
        return {"n": record.value["n"], "twice": 0}

    with running(app, "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
        with pytest.raises(OperatingError, match="7 offsets behind"):
            switch(app, "state_rm", 2, patience=0.5)
        assert read() == FIRST
        gate.set()
        switch(app, "state_rm", 2)
        assert read() == {f"k{n}": (n,) for n in range(7)}


@pytest.mark.guarantee("W82")
def test_a_version_beside_the_current_one_is_resynchronised_and_asked_by_its_name(
    declare, read, admin, name, wait_for
):
    app = declare(1, 2)
    with running(app, "consumers"):
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        admin.execute("update state_v2_rm set n = -1 where id < 'k2'")
        admin.execute("insert into state_v2_rm values ('gone', 1, 0, 0)")
        assert resync(app, "state_v2_rm") == (1, True)
        assert read("state_v2_rm", "id, n, twice") == SECOND
        assert read() == FIRST
        switch(app, "state_rm", 2)
        admin.execute("update state_v1_rm set n = -1 where id < 'k2'")
        assert resync(app, "state_v1_rm") == (0, True)
        assert read("state_v1_rm") == FIRST
        found = where(app, name, "k7")
        assert {one.place for one in found.places[1:]} == {
            f"read model state_rm of {name}.v2",
            f"read model state_v1_rm of {name}",
        }
        assert found.has_arrived, found.verdict


@pytest.mark.guarantee("W82", "W73")
@pytest.mark.parametrize("side", [False, True], ids=["on the row", "beside"])
def test_answers_are_of_what_readers_see(
    declare, read, admin, connect, name, bootstrap_servers, read_places, wait_for, side
):
    gates = {1: threading.Event(), 2: threading.Event()}
    app = declare(1, 2, gates=gates, side=side)
    both = [app.answers(one.model.function) for one in app.consumers]

    def let_lag(table: str, ahead: str, group: str, lagging: int, version: int) -> None:
        """Let the version that readers see lag behind the other one."""
        gates[lagging].clear()
        send(bootstrap_servers, name, range(KEYS), version)
        wait_for(
            lambda: {n // 1000 for n, *_ in read(ahead).values()} == {version - 1},
            timeout=60,
            what="the other one has all",
        )
        places = read_places(group)
        with connect() as connection:
            connection.autocommit = True
            for answers in both:
                admin.execute("delete from jobs_lib.answers")
                asked = {"key": "k1", "version": version, "timeout": 0}
                assert answers.wait_for(connection, **asked) is None
                assert answers.valid_since(connection).offsets == places
                assert answers.put(connection, key="k1", version=version, entity={})
                for other in both:
                    assert [one.key for one in other.newer(connection)] == ["k1"]
            gates[lagging].set()
            for answers in both:
                known = answers.wait_for(
                    connection, key="k1", version=version, timeout=30
                )
                assert (known.version, read(table)["k1"]) == (
                    version,
                    (1 + 1000 * (version - 1),),
                )
                assert answers.newer(connection) == []

    with running(app, "consumers"):
        for one in gates.values():
            one.set()
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        let_lag("state_rm", "state_v2_rm", name, 1, 2)
        wait_for(
            lambda: (
                [*read_places(name).values()] == [*read_places(f"{name}.v2").values()]
            ),
            timeout=60,
            what="both have all",
        )
        switch(app, "state_rm", 2)
        let_lag("state_rm", "state_v1_rm", f"{name}.v2", 2, 3)


@pytest.mark.guarantee("W82")
def test_a_version_is_dropped_once_nobody_keeps_it(
    declare, read, admin, name, wait_for
):
    both, second = declare(1, 2), declare(2)
    with running(both, "consumers"):
        # The old one must have nothing left to tell, which is another refusal.
        for table in ("state_rm", "state_v2_rm"):
            wait_for(lambda t=table: is_filled(read, t), timeout=60, what="it is full")
        with pytest.raises(OperatingError, match="readers see version 1 of state_rm"):
            drop_version(second, "state_rm", 1)
        switch(both, "state_rm", 2)
        owned = "select from jobs_lib.origins where role = %s and owner is not null"
        role = (f"consume:{name}",)
        wait_for(
            lambda: admin.execute(owned, role).rowcount == 2,
            timeout=60,
            what="it is kept",
        )
        with pytest.raises(OperatingError, match="these pods still keep version 1"):
            drop_version(second, "state_rm", 1)
    with running(second, "consumers"):
        assert drop_version(second, "state_rm", 1) == ["state_v1_rm"]
        assert read(columns="id, n, twice") == SECOND
    assert admin.execute("select to_regclass('state_v1_rm')").fetchone() == (None,)
    for table in ("offsets", "filled_topics", "read_models"):
        groups = admin.execute(f"select consumer_group from jobs_lib.{table}")
        assert {*groups} == {(f"{name}.v2",)}


SLOW = """
create function wait() returns trigger language plpgsql as
    $$ begin perform pg_sleep(0.002); return old; end $$;
create trigger slow before delete on jobs_lib.model_keys
    for each row execute function wait()
"""
"""Makes each key that is deleted take as long as many do."""


@pytest.mark.guarantee("W82")
def test_a_version_of_many_keys_is_dropped_in_steps_and_goes_on_where_it_was_ended(
    declare, admin, database, connect, monkeypatch
):
    both, second = declare(1, 2), declare(2)
    with database.connect("test") as connection:
        versions.add(connection, database.queries, both.consumers)
    admin.execute(
        "update jobs_lib.read_models set is_current = false;"
        "update jobs_lib.read_models set is_current = true where version = 2;"
        "alter table state_rm rename to state_v1_rm;"
        "alter table state_v2_rm rename to state_rm"
    )
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version)"
        " select model, 'k' || n, 1 from generate_series(1, 500) n,"
        " unnest('{state_rm,state_v2_rm}'::text[]) model"
    )
    admin.execute(SLOW)
    monkeypatch.setattr(session, "STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(dropping, "_KEYS", 20)
    counted = "select model, count(*) from jobs_lib.model_keys group by 1"
    # A view keeps the table, as a process does that is ended before the last step.
    admin.execute("create view seen as select * from state_v1_rm")
    with pytest.raises(
        OperatingError, match="view seen depends on table state_v1_rm; its tables are"
    ):
        drop_version(second, "state_rm", 1)
    admin.execute("drop view seen")
    holder = connect()
    holder.execute("lock table state_v1_rm")
    monkeypatch.setattr(session, "LOCK_SECONDS", 0.1)
    with pytest.raises(LockedError, match="its tables are there, and what was known"):
        drop_version(second, "state_rm", 1)
    holder.rollback()
    assert admin.execute(counted).fetchall() == [("state_v2_rm", 500)]
    assert drop_version(second, "state_rm", 1) == ["state_v1_rm"]
    found = admin.execute("select version from jobs_lib.read_models")
    assert found.fetchall() == [(2,)]


@pytest.mark.guarantee("W82")
def test_readers_of_the_old_tables_may_read_the_new_ones(
    declare, read, admin, wait_for
):
    role = f"reader_{id(declare)}"
    other = f"other_{role}"
    admin.execute(f'create role "{role}"; grant select on state_rm to "{role}", public')
    admin.execute(
        f'create role "{other}"; grant select (id), select (n) on state_rm to "{other}"'
    )
    app = declare(1, 2)
    try:
        with running(app, "consumers"):
            wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="full")
            switch(app, "state_rm", 2)
            # The first version has no such column.
            admin.execute(f'grant select (twice) on state_rm to "{other}"')
            with pytest.raises(
                OperatingError, match="may read the column twice of state_rm alone"
            ):
                switch(app, "state_rm", 1)
        admin.execute("revoke select on state_rm from public")
        found = admin.execute(
            "select has_table_privilege(%s, 'state_rm', 'select')", (role,)
        )
        assert found.fetchone() == (True,)
        found = admin.execute(
            "select has_column_privilege(%s, 'state_rm', c, 'select')"
            " from unnest('{id,n,version}'::text[]) c",
            (other,),
        )
        assert found.fetchall() == [(True,), (True,), (False,)]
    finally:
        for one in (role, other):
            admin.execute(f'drop owned by "{one}"; drop role "{one}"')


@pytest.mark.guarantee("W82")
def test_a_second_version_alone_stays_beside_a_first_one_that_has_run(
    declare, read, admin, wait_for
):
    with running(declare(None), "consumers"):
        wait_for(lambda: read() == FIRST, timeout=60, what="the first one is full")
    with running(declare(2), "consumers"):
        wait_for(lambda: is_filled(read, "state_v2_rm"), timeout=60, what="it is full")
        assert read() == FIRST


@pytest.mark.guarantee("W82")
def test_a_second_version_is_current_where_there_never_was_a_first_one(
    declare, read, admin, wait_for
):
    admin.execute("drop table state_rm; alter table state_v2_rm rename to state_rm")
    with running(declare(2), "consumers"):
        wait_for(
            lambda: read(columns="id, n, twice") == SECOND,
            timeout=60,
            what="readers see it",
        )


def test_a_version_whose_table_is_missing_is_refused_at_the_start(declare, admin):
    admin.execute("drop table state_v2_rm")
    with (
        pytest.raises(ConfigurationError, match=r"state_v2_rm .* not in this database"),
        running(declare(1, 2), "consumers"),
    ):
        pass


@pytest.mark.parametrize("version", [0, True, "2", 1.0])
def test_what_is_no_version_is_refused(declare, version):
    with pytest.raises(ConfigurationError, match="give a number from 1 on"):
        declare(version)


def test_a_version_whose_tables_name_would_be_cut_is_refused(make):
    with pytest.raises(ConfigurationError, match="cuts names after 63 bytes"):
        make().read_model("t", group="g", table="a" * 61, key="id", version=2)
