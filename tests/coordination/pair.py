"""A small system of two runs of one client, which run `runs.py`, as states and steps.

The earlier run has begun and may hold a partition, or has lost it by now. It may stand
still at any step, and so may the later one, which is begun at any time. Or none has
begun, and each may ask for a snapshot before it does. There are two places of the log:
the client's home, and that of the partition. Nobody knows the order of their records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.coordination.messages import Probe, Sender
from jobs_lib.coordination.runs import Runs, Verdict
from tests.coordination.search import BrokenError

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERVAL = 1
ANOTHER = 2
"""Another client, which may take what is stale."""
NOT_BEGUN, AT_WORK, ENDED = range(3)
BEGIN, LIVE, ASK = range(3)
CLAIM, BEAT, REFUSED = range(3)


class Record(NamedTuple):
    """A record of one of the places."""

    run: int
    kind: int
    time: int


class Run(NamedTuple):
    """A run of the client."""

    phase: int
    home_read: int
    part_read: int
    home_sent: tuple[int, ...] = ()
    """What it has sent to its home, and is not in the log yet."""
    part_sent: tuple[int, ...] = ()


class State(NamedTuple):
    """All that matters for what can come."""

    time: int
    home: tuple[Record, ...]
    part: tuple[Record, ...]
    runs: tuple[Run, Run]


@dataclass
class Pair:
    """An earlier and a later run of a client."""

    rules: type[Runs] = Runs
    time: int = 3
    """How often time passes."""
    home: int = 4
    """How many records there are."""
    part: int = 4
    holder: int = 0
    """Who holds the partition at first."""
    asks: bool = False
    """Whether no run has begun at first, and each may ask for a snapshot before."""
    _known: dict[object, tuple[Verdict, bool, bool]] = field(default_factory=dict)

    def begin(self) -> State:
        """Somebody holds the partition, and the earlier run has begun, if it has."""
        first = Record(0, BEGIN, 0)
        claim = Record(self.holder, CLAIM, 0)
        later = Run(NOT_BEGUN, 0, 0)
        if self.asks:
            return State(0, (), (claim,), (later, later))
        return State(0, (first,), (claim,), (Run(AT_WORK, 1, 1), later))

    def is_done(self, state: State) -> bool:
        """Whether one of the two has ended."""
        return ENDED in (one.phase for one in state.runs)

    def step(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield all that can happen next."""
        if state.time < self.time:
            yield "time passes", state._replace(time=state.time + 1)
        if len(state.part) < self.part and find_age(state) > 2 * INTERVAL:
            taken = Record(ANOTHER, CLAIM, state.time)
            yield "another takes it", state._replace(part=(*state.part, taken))
        for number, run in enumerate(state.runs):
            if run.phase == NOT_BEGUN:
                # It reads both places to their ends first.
                sent = (*run.home_sent, BEGIN)
                begun = Run(AT_WORK, len(state.home), len(state.part), sent)
                yield "begin", self._put(state, number, begun)
                if self.asks and not run.home_sent and not has_sent(state, number):
                    asking = run._replace(home_sent=(ASK,))
                    yield "ask for a snapshot", self._put(state, number, asking)
            yield from self._append(state, number)
            if run.phase == AT_WORK:
                yield from self._read(state, number)
                yield from self._send(state, number)

    def _append(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        run = state.runs[number]
        if run.home_sent and len(state.home) < self.home:
            record = Record(number, run.home_sent[0], state.time)
            left = run._replace(home_sent=run.home_sent[1:])
            longer = state._replace(home=(*state.home, record))
            yield "append to the home", self._put(longer, number, left)
        if run.part_sent and len(state.part) < self.part:
            kind = run.part_sent[0]
            holder, age = find_holder(state.part), find_age(state)
            if kind == CLAIM:
                needed = 2 * INTERVAL + 1 if holder == ANOTHER else INTERVAL
                is_valid = holder != number and age >= needed
            else:
                is_valid = holder == number
            record = Record(number, kind if is_valid else REFUSED, state.time)
            left = run._replace(part_sent=run.part_sent[1:])
            longer = state._replace(part=(*state.part, record))
            yield "append to the place", self._put(longer, number, left)

    def _read(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        run = state.runs[number]
        if run.home_read < len(state.home):
            read = run._replace(home_read=run.home_read + 1)
            yield "read the home", self._judge(state, number, read)
        if run.part_read < len(state.part):
            read = run._replace(part_read=run.part_read + 1)
            yield "read the place", self._judge(state, number, read)

    def _send(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        run = state.runs[number]
        verdict, owes_answer, has_begun = self._find(state, number, run)
        is_holder = find_holder(state.part[: run.part_read]) == number
        if not run.home_sent and (owes_answer or not is_holder) and has_begun:
            sent = run._replace(home_sent=(LIVE,))
            yield "say that it lives", self._put(state, number, sent)
        if run.part_sent or is_claiming(state, number, run):
            return
        if is_holder:
            sent = run._replace(part_sent=(BEAT,))
            yield "keep", self._put(state, number, sent)
        elif verdict is Verdict.GO_ON and has_begun:
            sent = run._replace(part_sent=(CLAIM,))
            yield "claim", self._put(state, number, sent)

    def _judge(self, state: State, number: int, run: Run) -> State:
        """Let a run draw its conclusion, and check both."""
        verdict = self._find(state, number, run)[0]
        if verdict in (Verdict.IS_REFUSED, Verdict.IS_REPLACED):
            # What it has sent is on its way. What it has read does not matter.
            run = Run(ENDED, 0, 0, run.home_sent, run.part_sent)
            if state.runs[1 - number].phase == ENDED:
                raise BrokenError("both runs have ended")
        after = self._put(state, number, run)
        if self._is_settled(after):
            raise BrokenError("both runs go on")
        return after

    def _is_settled(self, state: State) -> bool:
        """Whether both have read all, an answer too, and none of them will end."""
        homes = [record.run for record in state.home if record.kind != ASK]
        order = list(dict.fromkeys(homes))
        if len(order) < 2 or order[0] not in homes[homes.index(order[1]) :]:
            return False
        return all(
            one.phase == AT_WORK
            and one.home_read == len(state.home)
            and one.part_read == len(state.part)
            and not (one.home_sent or one.part_sent)
            for one in state.runs
        )

    def _find(self, state: State, number: int, run: Run) -> tuple[Verdict, bool, bool]:
        home, part = state.home[: run.home_read], state.part[: run.part_read]
        claims = is_claiming(state, number, run)
        key = number, home, part, claims
        if key not in self._known:
            runs = self.rules(str(number), INTERVAL)
            for one in home:
                probe = Probe(
                    Sender("group", "client", str(one.run)),
                    wants_snapshot=one.kind == ASK,
                    interval_ms=INTERVAL if one.kind == BEGIN else None,
                )
                runs.note_probe(probe, one.time)
            for at, record in enumerate(part):
                if at == 0 or record.kind != CLAIM or record.run == ANOTHER:
                    continue
                if (holder := find_holder(part[:at])) != ANOTHER:
                    runs.note_claim(str(record.run), str(holder))
            begun = any(one.run == number and one.kind != ASK for one in home)
            self._known[key] = runs.judge(is_claiming=claims), runs.owes_answer, begun
        return self._known[key]

    def _put(self, state: State, number: int, run: Run) -> State:
        runs = (run, state.runs[1]) if number == 0 else (state.runs[0], run)
        return state._replace(runs=runs)


def has_sent(state: State, number: int) -> bool:
    """Whether something of a run is in the home."""
    return any(one.run == number for one in state.home)


def find_holder(part: tuple[Record, ...]) -> int:
    """Find who holds the partition."""
    return next(one.run for one in reversed(part) if one.kind == CLAIM)


def find_age(state: State) -> int:
    """Find how long the holder has said nothing that was valid."""
    last = next(one.time for one in reversed(state.part) if one.kind != REFUSED)
    return state.time - last


def is_claiming(state: State, number: int, run: Run) -> bool:
    """Whether a run has not read a claim of its own back."""
    # What is refused may be one, too, and then it waits a little longer.
    unread = state.part[run.part_read :]
    return CLAIM in run.part_sent or any(
        one.run == number and one.kind != BEAT for one in unread
    )
