"""Read the rows of a shard, and make them into a block."""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jobs_lib.outbox.block import (
    BATCH,
    BYTES,
    ENTITY,
    HELD,
    ID,
    KEY_OF_TOPIC,
    LIVE,
    SIZE,
    TOPIC,
    BatchRows,
    Block,
    Headers,
    OutboxRecord,
    PlainRows,
    Refusal,
    make_record,
)
from jobs_lib.outbox.pace import BatchPace
from jobs_lib.outbox.rates import Rates
from jobs_lib.outbox.staged import OF_FRAME
from jobs_lib.outbox.starts import Start
from jobs_lib.outbox.states import States
from jobs_lib.outbox.unversioned import Unversioned
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set
    from uuid import UUID

    import psycopg

    from jobs_lib.outbox.block import BatchRow, Limited, LiveRow, Row
    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database

_HEADS = 1_000
"""Cached headers, one entry for each topic and re-export."""
_OF_TABLE = "reexport"
"""The cause of rows that stand for a key of a table, and for no change of its own."""
_ALL = Start()


class Reader:
    """Reads blocks of an owner's shards.

    Args:
        database: where the outbox is.
        owner: the process that owns the shards.
        limit: live rows in a block.
        entities: by name; they load the states of id-only rows.
        topics: by name; they say which rows are merged or settle, and encode values.
        source: the service's name in the headers of records.

    Attributes:
        pace: how many rows of re-exports a block may have, and when they wait.
        rates: how many of them may leave now.
    """

    def __init__(
        self,
        database: Database,
        owner: UUID,
        limit: int,
        *,
        entities: Mapping[str, Entity],
        topics: Mapping[str, Topic[Any]],
        source: str,
    ) -> None:
        self._database = database
        self._owner = owner
        self._limit = limit
        self._topics = topics
        self._source = source
        self._merging = {name for name, topic in topics.items() if topic.merge}
        settling = {n: t.settle for n, t in topics.items() if t.settle}
        self._settling = {
            "settles": bool(settling),
            "settling": text_array([*settling]),
            # The driver takes no list of whole numbers and others.
            "settle": [*map(float, settling.values())],
        }
        # SQL writes rows, too, and so did releases from before the topic had a schema.
        self._checked = {
            n: t.encoder for n, t in topics.items() if t.encoder.labels_rows
        }
        self._heads: dict[tuple[str, int | None], Headers] = {}
        self.pace = BatchPace()
        self.rates = Rates(database.queries, self.pace)
        self._unversioned = Unversioned(topics)
        self._states = States(
            database.queries,
            entities=entities,
            topics=topics,
            source=source,
            unversioned=self._unversioned,
        )

    def own(self, shard: int, epoch: int) -> dict[str, Any]:
        """The parameters that name the shard, its owner and its epoch."""
        return {
            "shard": shard,
            "origin": f"shard/{shard}",
            "owner": self._owner,
            "epoch": epoch,
        }

    def read(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        start: Start = _ALL,
        *,
        batch: bool = True,
    ) -> Block:
        """Read the next block of a shard, from ``start`` on.

        Rows of re-exports are read if ``batch`` is true, if there is room for them, and
        unless the shard rests.
        """
        block = Block(shard=shard)
        parameters = self.own(shard, epoch) | self._settling
        parameters["server"] = start.server
        # One snapshot for the live rows and the states of id-only rows: otherwise a
        # state newer than the live rows of its key would be sent before them. And for
        # the rows of re-exports whose changes those states have.
        with connection.transaction():
            live = connection.execute(
                self._database.queries["read_live"],
                {
                    **parameters,
                    "live_from": start.live,
                    "limit": self._limit,
                    # Smaller values always fit, even in a full block.
                    "inline": BYTES // self._limit,
                },
                prepare=True,
                binary=True,
            ).fetchall()
            if live:
                self.pace.note_live()
            fitting = self._fit(connection, shard, live)
            heads = {topic: self._head(topic, None) for topic in {*map(TOPIC, fitting)}}
            self._unversioned.report_tombstones(fitting, heads.keys())
            has_room = len(fitting) == len(live) < self._limit
            if self._are_plain(fitting, heads.keys()):
                block.outgoing = PlainRows(fitting, heads)
            elif not self._add_live(connection, block, fitting, heads):
                has_room = False
            if not batch or not has_room or self.pace.rests(shard):
                return block
            if self.rates.is_stuck():
                self.pace.rest(shard)
                return block
            parameters |= self._limit_batch(shard) | {"batch_from": start.batch}
            rows = self._read_batch(connection, parameters)
        self._take_batch(connection, block, parameters, rows)
        return block

    def _limit_batch(self, shard: int) -> dict[str, Any]:
        """The parameters that say how many rows of re-exports are read."""
        return {
            # Rows that were left a moment ago lie in front of those that may leave.
            "limit": self.pace.limit + self.pace.find_left(shard),
            "spent": int_array(self.pace.find_spent()),
        }

    def _read_batch(
        self, connection: psycopg.Connection[Any], parameters: Mapping[str, Any]
    ) -> list[BatchRow]:
        query = self._database.queries["read_batch"]
        return connection.execute(
            query, parameters, prepare=True, binary=True
        ).fetchall()

    def _take_batch(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        parameters: Mapping[str, Any],
        rows: list[BatchRow],
    ) -> None:
        """Add as many rows of re-exports to a block as their rates allow.

        Args:
            connection: in autocommit mode.
            block: has its live rows.
            parameters: of the query that has read the rows.
            rows: of re-exports, in the snapshot of the live rows.
        """
        found = BatchRows(rows)
        self.pace.note_left(block.shard, found.left)
        # Records are taken from the rate's bucket outside any snapshot: other relay
        # threads take from it, too, and must neither wait for a snapshot nor fail
        # because of one. And on this connection: threads that hold one connection and
        # wait for a second one would block each other.
        asked_at = time.monotonic()
        allowed = self.rates.allow(connection, block, found.share(self.pace.limit))
        if not (any(allowed.values()) or found.held or found.dropped):
            # Live rows of other shards would wait while this is asked again and again.
            self.pace.rest(block.shard)
            return
        known = {*map(ID, rows)}
        # Then read again, in one snapshot with the states: a row with a newer live row
        # by now must be dropped.
        with connection.transaction():
            again = BatchRows(self._read_batch(connection, parameters), known)
            left = self._add_batch(connection, block, again, allowed)
        # Outside the snapshot, as above.
        self.rates.give_back(connection, left)
        self.rates.note_load(allowed, time.monotonic() - asked_at)

    def read_held(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        row_id: int,
        spent: Set[int] = frozenset(),
    ) -> Block:
        """Read one held row as a block, to try whether Kafka takes it now.

        A row of a re-export is dropped under the same conditions as in :meth:`read`. It
        is left while its re-export is one of ``spent``, whose rates allow no record.
        """
        block = Block(shard=shard, retried=True)
        with connection.transaction():
            rows = connection.execute(
                self._database.queries["read_held"],
                self.own(shard, epoch) | {"id": row_id},
                binary=True,
            ).fetchall()
            for *row, reexport_id, dropped, cause, source, limited in rows:
                if reexport_id is not None:
                    block.reexports.add(reexport_id)
                if dropped:
                    block.dropped.append((BATCH, *row[:2]))
                    continue
                if limited and reexport_id in spent:
                    continue
                record = make_record(tuple(row), self._head(TOPIC(row), reexport_id))
                if reexport_id is not None:
                    # Before its state is loaded: its version may be the topic's next.
                    record.row_class = BATCH
                if limited:
                    # The rate is asked when its state is loaded, just before it leaves.
                    block.limited[reexport_id] = [(record, ())]
                if cause == _OF_TABLE:
                    record.of_table = reexport_id
                    record.staged = reexport_id if source == OF_FRAME else None
                block.records.append(record)
                self._complete(connection, block)
                self._unversioned.drop(
                    block, [one for one in block.records if one.of_table]
                )
        return block

    def _fit(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        rows: list[LiveRow],
    ) -> list[LiveRow]:
        """Return the first rows that fit into a block, with all their values."""
        if not any(map(SIZE, rows)):
            return rows
        total = 0
        fitting: list[LiveRow] = []
        large = set()
        for row in rows:
            # The first row is taken however large it is.
            if total >= BYTES:
                break
            fitting.append(row)
            row_id, _, _, _, value, *_, held, size = row
            if size is None:
                total += len(value or b"")
            elif not held:
                total += size
                large.add(row_id)
        values = dict(
            connection.execute(
                self._database.queries["read_values"],
                {"shard": shard, "ids": int_array(large)},
                prepare=True,
                binary=True,
            ).fetchall()
        )
        # No default: a row whose value is missing would go out as a tombstone.
        return [
            (*row[:4], values[row[0]], *row[5:]) if row[0] in large else row
            for row in fitting
        ]

    def _are_plain(self, rows: list[LiveRow], topics: Set[str]) -> bool:
        """Whether all of these rows are sent unchanged, one record each."""
        if any(map(HELD, rows)) or any(map(ENTITY, rows)):
            return False
        if not topics.isdisjoint(self._checked):
            return False
        merging = topics & self._merging
        if not merging:
            return True
        keys = [
            (topic, key)
            for topic, key in map(KEY_OF_TOPIC, rows)
            if topic in merging and key is not None
        ]
        return len({*keys}) == len(keys)

    def _add_live(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        rows: Iterable[LiveRow],
        heads: Mapping[str, Headers],
    ) -> bool:
        """Add live rows to a block; return whether all of their states fit into it."""
        places: dict[tuple[str, str], int] = {}
        records = block.records
        for row in rows:
            row_id, place, topic, key, *_ = row
            if HELD(row):
                block.behind.append((LIVE, row_id, place))
                continue
            record = make_record(row, heads[topic])
            if key is None or topic not in self._merging:
                records.append(record)
                continue
            # The last state of a key is enough; it stands for those before it.
            number = places.setdefault((topic, key), len(records))
            if number == len(records):
                records.append(record)
            else:
                record.supersede(records[number])
                records[number] = record
        return self._complete(connection, block)

    def _complete(self, connection: psycopg.Connection[Any], block: Block) -> bool:
        """Check the values of a block's records, and load the states of entities.

        Returns whether all states fit into the block.
        """
        if self._checked:
            self._check(block)
        loaded = [one for one in block.records if one.entity]
        if not loaded:
            return True
        return self._states.load(connection, block, loaded, _find_room(block))

    def _check(self, block: Block) -> None:
        """Refuse values that no consumer of their topic could read."""
        refused: dict[tuple[str, str | int], Refusal] = {}
        kept = []
        for record in block.records:
            which = record.topic, record.row_id if record.key is None else record.key
            if which in refused:
                # It waits behind a refused record of its key.
                continue
            error = self._find_fault(record)
            if error is None:
                kept.append(record)
            else:
                refused[which] = Refusal(record, error)
        block.keep(kept, [*refused.values()])

    def _find_fault(self, record: OutboxRecord) -> str | None:
        """Return what is wrong with a record's value, as far as can be seen here."""
        encoder = self._checked.get(record.topic)
        if encoder is None or record.value is None:
            return None
        try:
            encoder.check(record.value)
        except ValueError as error:
            return f"the value is not {encoder.content_type}: {error}"
        return None

    def _add_batch(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        found: BatchRows,
        allowed: Mapping[int, int],
    ) -> dict[int, int]:
        """Add rows of re-exports; return how many records of each had no room."""
        block.reexports |= found.reexports
        block.behind += found.held
        block.dropped += found.dropped
        records: list[OutboxRecord] = []
        for reexport_id, waiting in found.waiting.items():
            last: dict[tuple[str, str], Limited] = {}
            for row in waiting[: allowed.get(reexport_id, 0)]:
                row_id, place, topic, key, entity, *_, at, version, cause, source = row
                head = self._head(topic, reexport_id)
                of_table = reexport_id if cause == _OF_TABLE else None
                record = OutboxRecord(
                    topic, key, None, BATCH, row_id, place, head, at[1:-1], version,
                    entity=entity, of_table=of_table,
                    staged=of_table if source == OF_FRAME else None,
                )  # fmt: skip
                merged: tuple[Row, ...] = ()
                if before := last.get((topic, key)):
                    earlier, merged = before
                    if record.staged is not None and earlier.staged is None:
                        # The current state is newer than a staged one.
                        block.dropped.append(record.row)
                        continue
                    # Both would carry the same state.
                    block.dropped.append(earlier.row)
                    merged = (*merged, earlier.row)
                    known = version, earlier.version
                    record.version = max(
                        (one for one in known if one is not None), default=None
                    )
                    if earlier.of_table is None:
                        # It stands for a change, too, which no copy may miss.
                        record.of_table = None
                last[topic, key] = record, merged
            if last:
                block.limited[reexport_id] = [*last.values()]
            records += [record for record, _ in last.values()]
        room = _find_room(block)
        block.records.extend(records)
        counts = {one: len(found) for one, found in block.limited.items()}
        # In turns: all of them get a share of the room.
        turns = zip_longest(*([r for r, _ in one] for one in block.limited.values()))
        ordered = [record for turn in turns for record in turn if record is not None]
        self._states.load(connection, block, ordered, room)
        self._unversioned.drop(block, [one for one in records if one.of_table])
        return {n: count - len(block.limited[n]) for n, count in counts.items()}

    def _head(self, topic: str, reexport_id: int | None) -> Headers:
        """The headers that a topic's records share, by CloudEvents' Kafka binding."""
        head = self._heads.get((topic, reexport_id))
        if head is None:
            if len(self._heads) > _HEADS:
                self._heads.clear()
            shared = {
                "ce_specversion": "1.0",
                "ce_type": topic,
                "ce_source": self._source,
                "ce_cause": "live" if reexport_id is None else "reexport",
            }
            if reexport_id is not None:
                shared["ce_reexport"] = str(reexport_id)
            declared = self._topics.get(topic)
            encoder = None if declared is None else declared.encoder
            if encoder is not None and encoder.content_type and not encoder.labels_rows:
                shared["content-type"] = encoder.content_type
            # As bytes: the client would encode texts again for each record.
            head = [(name, value.encode()) for name, value in shared.items()]
            self._heads[topic, reexport_id] = head
        return head


def _find_room(block: Block) -> int:
    """How many bytes of states a block may load beside the values that it has.

    It is half a block at least. Otherwise values that come all the time would let only
    one state leave with each block.
    """
    taken = sum(len(one.value) for one in block.records if one.value is not None)
    return max(BYTES // 2, BYTES - taken)
