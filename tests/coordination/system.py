"""A small system of members and one partition of the log, as states and steps.

The members run `claims.py`, and the log is folded by `World`. Each step is one that a
member, the log or time can take alone. A member that is not chosen stands still: so
it may stop before and after each step, for any time. What it has sent is appended at
any later time, in its order, even if it has crashed meanwhile.

A state says nothing by names: it is the sorted tuple of what the clients are, and
times are ages. So states that differ by names or by the day are one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib.coordination import claims
from jobs_lib.coordination.claims import FREE, Hold, Phase
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.world import Entry, Holding, Outcome
from tests.coordination.rules import REAL, Rules
from tests.coordination.search import BrokenError
from tests.coordination.states import (
    NONE,
    AboutPartition,
    Back,
    Client,
    Numbers,
    Part,
    Run,
    State,
    find_holder,
    freeze,
    mark,
    mark_once,
    replace_part,
    replace_run,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TICK_MS = 100
NOW_MS = 1_000_000
PLACES = 1
ME = Sender("shop.mailer", "me", "this run")
MY_OTHER_RUN = Sender("shop.mailer", "me", "another run")
ANOTHER = Sender("shop.mailer", "another", "its run")
SHARED = tuple(Shared("shop.mailer", "orders", partition) for partition in range(2))
FAR = 100
"""Claims of others have greater numbers than a run's own."""


@dataclass
class Members:
    """Members that share partitions."""

    processes: tuple[int, ...] = (1, 1, 1)
    """For each client, how many processes of it may run at once."""
    partitions: int = 1
    records: int = 1
    """In each partition."""
    interval: int = 1
    """In ticks: how finely time is divided."""
    at_most_once: bool = False
    ordered: bool = True
    """Whether the records of a sender are appended in its order."""
    unread: int = 1
    """How many records about a partition a member sends before it reads one back."""
    alone: bool = False
    """Whether a member reads a record back before it sends one about any partition."""
    crashes: int = 0
    """How many processes are killed at most."""
    restates: bool = True
    """Whether what says a rule again is checked, beside the harm if it is broken."""
    rules: Rules = REAL
    _numbers: Numbers = field(default_factory=Numbers)
    _folded: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.oldest = 2 * self.interval + 1
        self.free = self._numbers.of(FREE)
        never = 0 if self.at_most_once else self.interval
        self.no_part = Part(self.free, never, NONE, NONE, NONE, 0, 0)
        parts = (self.no_part,) * self.partitions
        self.new_run = Run(1, parts, (), ())
        self.dead_run = Run(0, parts, (), ())

    def begin(self) -> State:
        """Nobody holds anything."""
        clients = tuple(Client(one, (self.new_run,) * one) for one in self.processes)
        # At most once, the first batch may be claimed without a position.
        unknown = (NONE if self.at_most_once else 0,) * self.partitions
        return State(
            self.crashes, unknown, (0,) * self.partitions, tuple(sorted(clients))
        )

    def is_done(self, state: State) -> bool:
        """Whether all was processed, or is claimed for good."""
        if self.at_most_once:
            return all(one == self.records for one in state.positions)
        return all(one == (1 << self.records) - 1 for one in state.done)

    def step(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield all that can happen next."""
        yield from self._pass_time(state)
        seen = set()
        for at, client in enumerate(state.clients):
            if client in seen:
                continue  # Its equal has taken the same steps.
            seen.add(client)
            for number, run in enumerate(client.runs):
                for place in range(1 if self.ordered else len(run.queue)):
                    if run.queue:
                        yield self._append(state, at, number, place)
                if not run.alive:
                    continue
                if state.crashes:
                    yield "crash", self._crash(state, at, number)
                if run.inbox:
                    yield self._read(state, at, number)
                for partition in range(self.partitions):
                    for name, done, acted in self._act(state, run, partition):
                        sends = len(acted.queue) > len(run.queue)
                        if self.alone and sends and (run.queue or run.inbox):
                            continue
                        reached = replace_run(state, at, number, acted)
                        yield name, reached._replace(done=done)

    # Time

    def _pass_time(self, state: State) -> Iterator[tuple[str, State]]:
        """Time passes for all. The log notices it with the next record.

        Nobody asks the world before a record is appended, so that the time of the log
        is as good as the true time. Where it is behind, holdings are less stale.
        """
        clients = [
            [
                Run(
                    run.alive,
                    tuple([self._age_part(one) for one in run.parts]),
                    tuple([self._age_sent(one) for one in run.queue]),
                    tuple([self._age_sent(one) for one in run.inbox]),
                )
                for run in one.runs
            ]
            for one in state.clients
        ]
        yield "time passes", freeze(state, clients)

    def _age_part(self, part: Part) -> Part:
        sent = part.sent
        if sent < self.interval and not self.at_most_once:
            sent += 1
        age = part.age
        if part.claim != NONE and age < self.oldest:
            age += 1
        return part._replace(sent=sent, age=age)

    def _age_sent(self, item: tuple[int, int]) -> tuple[int, int]:
        code, age = item
        if age < 0 or age == self.interval:
            return item
        return code, age + 1

    # Processes

    def _crash(self, state: State, at: int, number: int) -> State:
        """A process is killed, and a new one of its client may begin.

        What it has sent is on its way, and what the log says of it stays. A client
        that is not started again is one whose new process stands still.
        """
        run = state.clients[at].runs[number]
        parts = tuple(
            self.no_part._replace(claim=one.claim, age=one.age, confirmed=one.confirmed)
            for one in run.parts
        )
        queue = tuple((one, NONE) for one, _ in run.queue)
        clients = [list(one.runs) for one in state.clients]
        clients[at][number] = self.new_run
        if (left := self._drop(Run(0, parts, queue, ()))) is not None:
            clients[at].append(left)
        return freeze(state._replace(crashes=state.crashes - 1), clients)

    def _drop(self, run: Run) -> Run | None:
        """Forget a killed run that nothing is left of."""
        return None if run == self.dead_run else run

    # The log

    def _append(
        self, state: State, at: int, number: int, place: int
    ) -> tuple[str, State]:
        """Append a record that was sent: the time moves, and then it counts."""
        clients = [list(one.runs) for one in state.clients]
        run = clients[at][number]
        code, sent = run.queue[place]
        message: AboutPartition = self._numbers.things[code]
        partition = message.shared.partition
        holder = find_holder(clients, partition)
        relation, held = NONE, self.no_part
        if holder is not None:
            held = clients[holder[0]][holder[1]].parts[partition]
            relation = 2 if holder[0] != at else int(holder[1] != number)
        offset = NONE
        if type(message) is ClaimingPartition:
            offset = self._find_unused(run, partition)
        position = state.positions[partition]
        seen = position, relation, held.claim, held.age, held.confirmed, offset
        folded = self._folded.get((code, seen))
        if folded is None:
            folded = self._folded[code, seen] = self._fold(message, *seen)
        outcome, told, holding = folded
        valid = outcome is Outcome.VALID
        self._check(message, valid, seen, holding)
        if told != position:
            self._check_position(state, message, told)
            positions = list(state.positions)
            positions[partition] = told
            state = state._replace(positions=tuple(positions))
        if holder is not None:
            other = clients[holder[0]][holder[1]]
            gone = held._replace(claim=NONE, age=0, confirmed=0)
            clients[holder[0]][holder[1]] = replace_part(other, gone, partition)
        if holding is not None:
            whose = holder if holding[0] else (at, number)
            assert whose is not None
            other = clients[whose[0]][whose[1]]
            claim, age, confirmed = holding[1:]
            part = other.parts[partition]._replace(
                claim=claim, age=age, confirmed=confirmed
            )
            clients[whose[0]][whose[1]] = replace_part(other, part, partition)
        run = clients[at][number]
        run = run._replace(queue=run.queue[:place] + run.queue[place + 1 :])
        if run.alive:
            hold: Hold = self._numbers.things[run.parts[partition].hold]
            if hold.phase is Phase.HELD and outcome is not Outcome.NOT_NEXT:
                told = NONE  # Its member knows it, or does not ask.
            if isinstance(message, Heartbeat | ReleasingPartition):
                message = message._replace(position=None)  # The world has it now.
            back = self._numbers.of(Back(message, offset, outcome, told))
            run = run._replace(inbox=(*run.inbox, (back, sent)))
        left = self._drop(run)
        if left is None:
            del clients[at][number]
        else:
            clients[at][number] = left
        name = f"{type(message).__name__} {'valid' if valid else 'refused'}"
        return name, freeze(state, clients)

    def _fold(
        self,
        message: AboutPartition,
        position: int,
        relation: int,
        claim: int,
        age: int,
        confirmed: int,
        offset: int,
    ) -> tuple[Outcome, int, tuple[int, int, int, int] | None]:
        """Let the world fold it; return whose the holding is then, and what it is."""
        world = self.rules.world(0)
        world.now_ms, world.partitions = NOW_MS, PLACES
        shared = message.shared
        holding = None
        if relation != NONE:
            whose = (ME, MY_OTHER_RUN, ANOTHER)[relation]
            holding = Holding(
                whose.client_id,
                whose.instance_id,
                claim + relation * FAR,
                self.interval * TICK_MS,
                NOW_MS - age * TICK_MS,
                bool(confirmed),
            )
        world.entries[shared] = Entry(None if position == NONE else position, holding)
        outcome = world.fold(max(offset, 0), NOW_MS, PLACES, message)
        entry = world.find(shared)
        told = NONE if entry.position is None else entry.position
        if entry.holding is None:
            return outcome, told, None
        after = entry.holding
        whose_now, number = divmod(after.claim, FAR)
        age = (NOW_MS - after.last_ms) // TICK_MS
        return outcome, told, (whose_now, number, age, int(after.confirmed))

    def _find_unused(self, run: Run, partition: int) -> int:
        """Find a number for a claim: one that nothing of the run means any more."""
        part = run.parts[partition]
        used = {part.claim, self._numbers.things[part.hold].claim}
        for code, _ in run.queue + run.inbox:
            thing = self._numbers.things[code]
            message = thing.message if type(thing) is Back else thing
            if message.shared.partition == partition:
                used.add(getattr(message, "claim", None))
                used.add(getattr(thing, "offset", None))
        return next(one for one in range(FAR) if one not in used)

    # What a member does

    def _read(self, state: State, at: int, number: int) -> tuple[str, State]:
        """Read the next own record back."""
        run = state.clients[at].runs[number]
        (code, sent), *rest = run.inbox
        run = run._replace(inbox=tuple(rest))
        back: Back = self._numbers.things[code]
        message, partition = back.message, back.message.shared.partition
        part = run.parts[partition]
        hold: Hold = self._numbers.things[part.hold]
        after = claims.read_back(hold, message, back.offset, back.outcome)
        valid, done = back.outcome is Outcome.VALID, state.done
        name = f"read {type(message).__name__} back"
        if (
            after.phase is Phase.CONFIRMING
            and not self.rules.reads_first_heartbeat_back
        ):
            # It begins as soon as it has read its claim back, however old that is.
            after, part = Hold(Phase.HELD, after.claim), part._replace(sent=0)
        if after.phase is Phase.FREE:
            part = self.no_part._replace(
                busy=part.busy, claim=part.claim, age=part.age, confirmed=part.confirmed
            )
        else:
            part = part._replace(hold=self._numbers.of(after))
        if after.phase is Phase.HELD:
            begins = hold.phase is not Phase.HELD
            is_told = valid and type(message) is Heartbeat
            if self.restates and begins and not is_told:
                raise BrokenError("a partition is held without a heartbeat")
            if begins or back.outcome is Outcome.NOT_NEXT:
                part = part._replace(next=back.position)
            if valid and type(message) is not ClaimingPartition:
                part = part._replace(sent=sent)
        if valid and type(message) is ClaimingMessages:
            if self.rules.processes_before_reading_back:
                part = part._replace(busy=message.end - 1)
            else:
                done = mark_once(done, partition, message.end - 1)
        run = replace_part(run, part, partition)
        return name, replace_run(state, at, number, run)._replace(done=done)

    def _act(
        self, state: State, run: Run, partition: int
    ) -> Iterator[tuple[str, tuple[int, ...], Run]]:
        """Yield what a member may do by itself about a partition."""
        part, shared = run.parts[partition], SHARED[partition]
        hold: Hold = self._numbers.things[part.hold]
        sent = self._find_unread(run, partition)
        if ReleasingPartition in sent:
            return  # It has stopped, and waits for the answer.
        if hold.phase is Phase.FREE and not sent and part.busy == NONE:
            now, claim = claims.begin_claim(ME, shared, self.interval * TICK_MS)
            if not self.rules.reads_claim_back:
                now = Hold(Phase.HELD)
                part = part._replace(sent=0, next=state.positions[partition])
            part = part._replace(hold=self._numbers.of(now))
            yield "claim", state.done, self._send(run, part, claim)
        is_held = hold.phase is Phase.HELD
        next_one = None if part.next == NONE else part.next
        may_send = len(sent) < self.unread
        if may_send:
            told = next_one if is_held and not self.at_most_once else None
            if (beat := claims.keep(hold, ME, shared, told)) is not None:
                yield "keep", state.done, self._send(run, part, beat)
        if is_held and not sent and part.busy == NONE:
            release = claims.release(hold, ME, shared, next_one)
            if release is not None:
                yield "release", state.done, self._send(run, part, release)
        if self.at_most_once:
            yield from self._process_at_most_once(state, run, partition, may_send)
        else:
            yield from self._process_at_least_once(state, run, partition)

    def _process_at_least_once(
        self, state: State, run: Run, partition: int
    ) -> Iterator[tuple[str, tuple[int, ...], Run]]:
        part = run.parts[partition]
        hold: Hold = self._numbers.things[part.hold]
        record = max(part.next, 0)
        if part.busy != NONE:
            done = mark(state.done, partition, part.busy)
            ended = part._replace(busy=NONE)
            if hold.phase is Phase.HELD:
                ended = ended._replace(next=part.busy + 1)
            yield "finish a batch", done, replace_part(run, ended, partition)
        elif hold.phase is Phase.HELD and record < self.records:
            if self.rules.asks_whether_sure and not claims.is_sure(
                0, part.sent, self.interval
            ):
                return
            if self.restates and (part.claim == NONE or part.claim != hold.claim):
                raise BrokenError("a batch begins though the partition is lost")
            self._check_begin(state, part, partition)
            begun = part._replace(busy=record)
            yield "begin a batch", state.done, replace_part(run, begun, partition)

    def _process_at_most_once(
        self, state: State, run: Run, partition: int, may_send: bool
    ) -> Iterator[tuple[str, tuple[int, ...], Run]]:
        part, shared = run.parts[partition], SHARED[partition]
        hold: Hold = self._numbers.things[part.hold]
        record = max(part.next, 0)
        if part.busy != NONE:
            # Only with the well-known steps: the batch was found in the log.
            beat = claims.keep(hold, ME, shared, part.busy + 1)
            ended = part._replace(busy=NONE)
            done = mark_once(state.done, partition, part.busy)
            if beat is not None:
                yield "commit and process", done, self._send(run, ended, beat)
        elif may_send and record < self.records:
            first = None if part.next == NONE else part.next
            claim = claims.claim_messages(hold, ME, shared, first, record + 1)
            if claim is not None:
                ahead = part._replace(next=record + 1)
                yield "claim a batch", state.done, self._send(run, ahead, claim)

    def _send(self, run: Run, part: Part, message: AboutPartition) -> Run:
        run = replace_part(run, part, message.shared.partition)
        # The age of a record matters if it can make its sender sure.
        matters = isinstance(message, Heartbeat) and not self.at_most_once
        item = (self._numbers.of(message), 0 if matters else NONE)
        return run._replace(queue=(*run.queue, item))

    def _find_unread(self, run: Run, partition: int) -> list[type]:
        """Find the kinds of records about a partition that are not read back."""
        found = []
        for code, _ in run.queue + run.inbox:
            thing = self._numbers.things[code]
            message = thing.message if type(thing) is Back else thing
            if message.shared.partition == partition:
                found.append(type(message))
        return found

    # What must hold

    def _check(
        self,
        message: AboutPartition,
        valid: bool,
        seen: tuple[int, ...],
        holding: tuple[int, int, int, int] | None,
    ) -> None:
        """Check that a record has done only what it may, without the world."""
        _, relation, claim, age, _, _ = seen
        if not isinstance(message, ClaimingPartition):
            if valid and (relation, claim) != (0, message.claim):
                raise BrokenError("a record counts without its claim")
        elif valid and relation != NONE:
            needed = self.interval if relation == 1 else self.oldest
            if age < needed:
                raise BrokenError("a partition is taken from a holder that may live")
        elif relation != NONE and (holding is None or holding[:2] != (relation, claim)):
            raise BrokenError("a holder loses its partition")

    def _check_begin(self, state: State, part: Part, partition: int) -> None:
        """Check that nobody begins a batch while one of another holder goes on."""
        runs = [list(one.runs) for one in state.clients]
        if part.claim != NONE or (holder := find_holder(runs, partition)) is None:
            return
        if runs[holder[0]][holder[1]].parts[partition].busy != NONE:
            raise BrokenError("a batch begins beside one of the holder")

    def _check_position(self, state: State, message: AboutPartition, told: int) -> None:
        partition = message.shared.partition
        if told < state.positions[partition]:
            raise BrokenError("a position falls")
        before = (1 << told) - 1
        if not self.at_most_once and state.done[partition] & before != before:
            raise BrokenError("a position passes a record that nobody has processed")
