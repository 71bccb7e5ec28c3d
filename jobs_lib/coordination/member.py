"""A member of a group: claims a fair share of partitions, keeps it, and releases it.

See PROTOCOL.md, section 5. One thread ticks: it sends heartbeats, claims and releases,
and never waits. What was read back is answered by the thread that reads the log. The
member's listener is called by a third one, so that nothing holds up a heartbeat.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Self

from jobs_lib import telemetry
from jobs_lib.coordination import claims
from jobs_lib.coordination.claims import Hold, Phase
from jobs_lib.coordination.holdings import Holdings
from jobs_lib.coordination.kept import Kept
from jobs_lib.coordination.log import Log
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Snapshot,
)
from jobs_lib.coordination.names import (
    check_interval,
    check_names,
    check_pause,
    check_topics,
    refuse_client,
)
from jobs_lib.coordination.notices import HoldListener, Notices
from jobs_lib.coordination.patience import PIECE, Patience, read_clock
from jobs_lib.coordination.runs import Runs, Verdict
from jobs_lib.coordination.shares import (
    Attendance,
    find_former,
    find_share,
    find_surplus,
    order_parts,
)
from jobs_lib.coordination.topics import Topics
from jobs_lib.coordination.world import Outcome
from jobs_lib.errors import UnavailableError
from jobs_lib.loop import Loop
from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from jobs_lib.coordination.messages import Message
    from jobs_lib.coordination.writer import Sent
    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings

BEATS = 3
"""Heartbeats in an interval."""
_TICKS = 6
"""Ticks in an interval."""
_START_SECONDS = 30.0
_TOPICS_EVERY = 10.0


class Member(Holdings):
    """Claims partitions of topics for a group, and keeps them.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: str,
        group: str,
        client_id: str,
        topics: Collection[str] = (),
        listener: HoldListener,
        interval: float = 10.0,
        topics_every: float = _TOPICS_EVERY,
        parts: Callable[[], Iterable[Partition]] | None = None,
        awaits_topics: bool = False,
        is_busy: Callable[[Shared], bool] = lambda _: False,
    ) -> None:
        """Check what is given; no connection is made yet.

        Args:
            settings: where Kafka is.
            log: the name of the coordination log in Kafka.
            group: the group's name, with a namespace: ``shop.mailer``.
            client_id: the member's name, the same after a restart.
            topics: those that are shared. All members of a group name the same ones.
            listener: learns what is held.
            interval: seconds; a record about each held partition comes at least as
                often, and a member that is silent for two of them has lost all.
            topics_every: seconds between two looks whether topics have more partitions.
            parts: returns what is shared instead of topics, as names with numbers. They
                need not be in Kafka, and may come and go.
            awaits_topics: whether it starts without topics that do not exist yet, and
                claims their partitions once they do.
            is_busy: whether something of a partition is still processed that the
                listener knows to be lost: it is not claimed meanwhile. It must not
                wait. By default, the listener returns only when nothing is.

        Raises:
            ConfigurationError: a value cannot be used.
        """
        check_names(log, group, client_id)
        if parts is None:
            check_topics(topics)
        check_interval(interval)
        check_pause(topics_every)
        sender = Sender(group, client_id, uuid.uuid4().hex)
        read = Log(settings, log, sender, interval=interval)
        super().__init__(read, sender, interval)
        self.error: Exception | None = None
        """Why it has ended for good."""
        self._listener = listener
        self._is_busy = is_busy
        self._interval_ms = round(interval * 1000)
        self._before: dict[Shared, Kept] = {}
        """What was held before the log was lost."""
        self._losing: Counter[Shared] = Counter()
        """Whose loss the listener is told, and may not have noted yet."""
        self._attendance = Attendance(group, self._interval_ms)
        self._runs = Runs(sender.instance_id, self._interval_ms)
        self._resuming: set[Shared] = set()
        """What another instance of this client holds, or held last."""
        self._is_seen = False
        """Whether the first record of this instance was read back."""
        self._beginning: Sent | None = None
        """That record."""
        self._is_stopping = False
        self._probed_at = -math.inf
        self._news = threading.Event()
        self._notices = Notices(group)
        self._ticking = Loop(f"member {group}", self._tick_on)
        self._topics = Topics(
            settings,
            group,
            topics,
            topics_every,
            self._news.set,
            parts,
            awaits_topics=awaits_topics,
        )
        self.pulses = [self._ticking.pulse, self.log.pulse]
        self.log.listen(self)

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def start(self) -> None:
        """Read the log, and begin to claim.

        If another instance of the client holds partitions, it waits until these are not
        fresh: for one interval at most. It takes them over then.

        Raises:
            AccessError: Kafka does not let this client in, or denies a right.
            ConfigurationError: the topic cannot be the log, or ``parts`` returns
                something that cannot be shared.
            FencedError: another process has this client's name.
            TopicError: a topic does not exist, and it awaits none.
            UnavailableError: no broker answers, or nothing is read back in time.
        """
        self._topics.start()
        try:
            self.log.start()
        except BaseException:
            self._topics.stop(0)
            raise
        try:
            self._notices.start()
            self._ticking.start()
            self._wait_until_begun()
        except BaseException:
            # What runs already would go on to read, or to hold what nobody works with.
            self.stop(0)
            raise

    def _wait_until_begun(self) -> None:
        with self.log.lock:
            patience = Patience(_START_SECONDS + 2 * self.interval)
            while not (
                self.error
                or self._is_stopping
                or (self._is_seen and not self._resuming)
                or patience.is_over
            ):
                self.log.lock.wait(PIECE)
            if self.error is not None:
                raise self.error
            if not self._is_seen:
                raise UnavailableError(
                    f"the member {self.sender.client_id!r} cannot write to the "
                    f"coordination log {self.log.topic!r}: nothing was read back "
                    f"within {_START_SECONDS:g} s"
                )

    def ask_to_stop(self) -> None:
        """Let :meth:`start`, in another thread, wait no longer, and release all."""
        self.log.give_up_start()
        with self.log.lock:
            self._is_stopping = True
            self._news.set()
            self.log.lock.notify_all()

    def stop(self, timeout: float = 5.0) -> None:
        """Release all, and end.

        Args:
            timeout: seconds to wait for the listener, and for a look at what is shared.
                What is not released then becomes stale, and others claim it after two
                intervals.
        """
        self.ask_to_stop()
        with self.log.lock:
            self.log.lock.wait_for(lambda: self.error or not self._kept, timeout)
        self._ticking.stopping.set()
        self._news.set()
        self._ticking.stop()
        self._topics.stop(timeout)
        with self.log.lock:
            self._drop_all()
        self._notices.stop(timeout)
        self.log.stop()

    # The thread that ticks

    def _tick_on(self) -> Iterator[None]:
        while not self._ticking.stopping.is_set():
            with self.log.lock:
                if self.log.is_known and self.error is None:
                    self._tick()
            yield
            self._news.wait(self.interval / _TICKS)
            self._news.clear()

    def _tick(self) -> None:
        now = read_clock()
        self._beat(now)
        if self._is_stopping:
            if self._kept:
                self._announce(now)
            # Else say nothing: others would think that it still wants a share.
            self._leave(list(self._kept))
            return
        verdict = self._judge_runs()
        if self.error is not None:
            return
        self._announce(now)
        self._leave(
            [one for one in self._kept if self._is_paused(self.log.find_place(one))]
        )
        if verdict is Verdict.GO_ON:
            self._resume()
            self._balance()

    def _beat(self, now: float) -> None:
        """Keep what is held."""
        for shared, kept in self._kept.items():
            # By a half tick earlier: the next one would come too late.
            due = kept.sent_at + self.interval * (1 / BEATS - 0.5 / _TICKS)
            if not kept.is_releasing and now >= due:
                self._send_heartbeat(shared, kept)

    def _announce(self, now: float) -> None:
        """Be seen: without a partition, and by a run that has begun after this one."""
        if self._kept and not self._runs.owes_answer:
            return
        if now < self._probed_at + self.interval / BEATS:
            return
        if self._is_seen:
            self._probed_at = now
            self.log.send(Probe(self.sender), place=self._find_home())
        elif self._beginning is None or self._beginning.is_done:
            self._probed_at = now
            self._beginning = self.log.send(
                Probe(self.sender, interval_ms=self._interval_ms),
                place=self._find_home(),
                then=self._note_seen,
            )

    def _find_home(self) -> int:
        """Find the place in which all runs of this client say that they live."""
        return choose_partition(self.sender.client_id, self.log.partitions)

    def _judge_runs(self) -> Verdict:
        """Look whether another run of this client goes on, and end then."""
        verdict = self._runs.judge(is_claiming=True)
        # Its own claims matter only then, and there may be many.
        if verdict is Verdict.WAIT and not self._is_claiming():
            verdict = self._runs.judge(is_claiming=False)
        if self.error is None and verdict is Verdict.IS_REFUSED:
            self._end("is at work")
        elif self.error is None and verdict is Verdict.IS_REPLACED:
            self._end("has taken its partitions over, as after a restart")
        return verdict

    def _is_claiming(self) -> bool:
        """Whether the fate of an own claim is not known yet."""
        return any(one.hold.phase is Phase.CLAIMING for one in self._kept.values())

    def _note_seen(self, sent: Sent) -> None:
        if sent.error is not None or self._is_seen:
            return
        self._is_seen = True
        self._resuming = find_former(self.log.get_worlds(), self.sender)
        self._news.set()

    def _resume(self) -> None:
        """Take over what a former instance held, once that is not fresh."""
        if not self._resuming:
            return
        former = find_former(self.log.get_worlds(), self.sender)
        there = set(self._topics.last.parts)
        for shared in list(self._resuming):
            if shared not in former:
                self._resuming.discard(shared)
            elif (shared.topic, shared.partition) not in there:
                self._resuming.discard(shared)  # It is not shared any more.
            elif shared not in self._kept:
                self._try_to_claim(shared)
        if not self._resuming:
            self.log.lock.notify_all()

    def _balance(self) -> None:
        """Claim what is missing in the own share, and leave what is above it."""
        if not self._is_seen:
            return
        members = self._attendance.list_members()
        parts, missing_topics = self._topics.last
        share = find_share(self.sender.client_id, members, len(parts))
        ordered = [
            Shared(self.sender.group_id, *part)
            for part in order_parts(self.sender.client_id, members, parts)
        ]
        # What is held of a missing topic is no part of a share: others that have never
        # seen the topic would leave too much to this member.
        staying = [
            one
            for one, kept in self._kept.items()
            if not kept.is_leaving and one.topic not in missing_topics
        ]
        surplus = find_surplus(staying, ordered, share)
        self._leave(surplus)
        resuming = len(self._resuming - self._kept.keys())
        missing = share - len(staying) + len(surplus) - resuming
        for shared in ordered:
            if missing <= 0:
                break
            if shared not in self._kept and self._try_to_claim(shared):
                missing -= 1

    def _try_to_claim(self, shared: Shared) -> bool:
        """Claim a partition, if that would be valid now; else let time pass there.

        One that was lost waits until nothing of it is processed here any more. Returns
        whether it is claimed, or will be once the log's end was read.
        """
        place = self.log.find_place(shared)
        world = self.log.get_world(place)
        is_busy = shared in self._losing or self._is_busy(shared)
        if is_busy or world.judge(self.sender, shared) is not Outcome.VALID:
            # It also tells in the end whether a claim of a batch is in the log.
            self.log.probe([place], self.interval / BEATS)
            return False
        if not self._knows_ends({place, self._find_home()}):
            return True
        hold, message = claims.begin_claim(self.sender, shared, self._interval_ms)
        has_ousted = world.find(shared).holding is not None
        kept = Kept(hold, has_ousted=has_ousted)
        self._kept[shared] = kept
        self.log.send(message, then=partial(self._read_claim_back, kept))
        return True

    def _knows_ends(self, places: set[int]) -> bool:
        """Whether places of the log were read to their ends; else ask for these.

        A process that stood still would claim what others hold by now. And its client's
        home says whether another run of it goes on.
        """
        late = [place for place in places if not self.log.is_current(place)]
        for place in late:
            self.log.catch_up(place, self._note_end)
        return not late

    def _note_end(self, sent: Sent) -> None:
        if sent.error is None:
            self._news.set()

    def _leave(self, leaving: Iterable[Shared]) -> None:
        for shared in leaving:
            kept = self._kept[shared]
            if kept.hold.phase is Phase.HELD and not kept.is_leaving:
                kept.is_leaving = True
                self._notices.put(self._listener.leave, shared)

    def _is_paused(self, place: int) -> bool:
        return self.log.get_world(place).is_paused(self.sender.group_id)

    # What the log says: called by the thread that reads it

    def _read_claim_back(self, kept: Kept, sent: Sent) -> None:
        """Read a claim back, unless the partition was lost meanwhile.

        It may have been claimed anew since, and that claim is another one.
        """
        assert isinstance(sent.message, ClaimingPartition)
        if self._kept.get(sent.message.shared) is kept:
            self._read_back(sent)

    def _read_back(self, sent: Sent) -> None:
        message = sent.message
        assert not isinstance(message, (Probe, ReleaseGroup, Snapshot))
        shared = message.shared
        kept = self._kept.get(shared)
        if kept is None:
            return
        if sent.outcome is None or sent.offset is None:
            # Nobody knows. A claim that is in the log all the same becomes stale.
            if isinstance(message, ClaimingPartition) or (
                isinstance(message, ReleasingPartition)
                and message.claim == kept.hold.claim
            ):
                # The next tick claims anew. At once, it might fail at once again.
                del self._kept[shared]
                self.log.lock.notify_all()
            return
        before = kept.hold
        kept.hold = claims.read_back(before, message, sent.offset, sent.outcome)
        if kept.hold.phase is Phase.FREE:
            self._drop(shared, is_lost=not isinstance(message, ReleasingPartition))
        elif kept.hold.phase is Phase.CONFIRMING:
            if before.phase is Phase.CLAIMING:
                self._send_heartbeat(shared, kept)
        elif (
            isinstance(message, (Heartbeat, ClaimingMessages))
            and sent.outcome is Outcome.VALID
            and message.claim == kept.hold.claim
        ):
            kept.sure_at = max(kept.sure_at, sent.sent_at)
            if isinstance(message, ClaimingMessages):
                kept.position = message.end
                # It keeps the partition as a heartbeat does.
                kept.sent_at = max(kept.sent_at, sent.sent_at)
            if before.phase is not Phase.HELD:
                kept.position = self.log.find(shared).position
                self._notices.put(self._listener.taken, shared, kept.position)

    def applied(self, place: int, message: Message, outcome: Outcome) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""
        now_ms = self.log.get_world(place).now_ms
        self._note_run(place, message, outcome, now_ms)
        self._attendance.note(place, message, outcome, now_ms)
        sender = message.sender
        if not self.log.is_known or sender[0] != self.sender[0]:
            return
        # Nothing else says anything of the runs of this client.
        if sender[1] == self.sender[1] and isinstance(
            message, (Probe, ClaimingPartition)
        ):
            self._judge_runs()
        if sender == self.sender:
            return
        if isinstance(message, ReleasingPartition):
            self._news.set()  # It may be claimed at once.
        if (
            isinstance(message, ClaimingPartition)
            and outcome is Outcome.VALID
            and message.shared in self._kept
        ):
            # Its release may be in the log, and not acknowledged yet.
            is_releasing = self._kept[message.shared].is_releasing
            self._drop(message.shared, is_lost=not is_releasing)

    def _note_run(
        self, place: int, message: Message, outcome: Outcome, now_ms: int
    ) -> None:
        """Note what a run of this client has said; this one is a run, too."""
        sender = message.sender
        if sender[:2] != self.sender[:2]:
            return
        if isinstance(message, Probe) and place == self._find_home():
            before = self._runs.owes_answer
            self._runs.note_probe(message, now_ms)
            if self._runs.owes_answer and not before:
                self._probed_at = -math.inf
                self._news.set()
        elif isinstance(message, ClaimingPartition) and outcome is Outcome.VALID:
            holder = self._attendance.find_holder(message.shared)
            if holder is not None and holder[0] == sender.client_id:
                self._runs.note_claim(sender.instance_id, holder[1])

    def lost(self, reason: str) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""
        self._before |= {
            shared: kept
            for shared, kept in self._kept.items()
            if kept.hold.claim is not None
        }
        self._drop_all()
        self._attendance.forget()

    def known(self) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""
        self._attendance.read(self.log.get_worlds())
        before, self._before = self._before, {}
        for shared, kept in before.items():
            holding = self.log.find(shared).holding
            if (
                holding is not None
                and holding.is_of(self.sender)
                and holding.claim == kept.hold.claim
            ):
                # It was lost with the log, and the log still says who holds it.
                hold = Hold(Phase.CONFIRMING, holding.claim)
                self._kept[shared] = Kept(hold, has_ousted=kept.has_ousted)
            elif (
                holding is not None
                and holding.client_id == self.sender.client_id
                and not holding.is_of(self.sender)
                and not kept.is_releasing
            ):
                # The claim may lie before the snapshot with which this reader began.
                self._runs.note_claim(holding.instance_id, self.sender.instance_id)
        self._judge_runs()
        self._news.set()

    def _end(self, what: str) -> None:
        """End for good."""
        self.error = refuse_client(self.sender, what)
        # Only those who ask for it would see it otherwise.
        telemetry.emit("loop.failed", loop=self._ticking.name, error=self.error)
        self._drop_all()
        self._notices.put(self._listener.ended, self.error)
        self.log.lock.notify_all()

    def _drop(self, shared: Shared, *, is_lost: bool = False) -> None:
        kept = self._kept.pop(shared, None)
        # Whoever was told of it is told of its end.
        if kept is not None and is_lost and kept.sure_at > -math.inf:
            telemetry.emit(
                "partition.lost",
                group=self.sender.group_id,
                origin=shared.origin,
            )
            self._losing[shared] += 1
            self._notices.put(self._tell_lost, shared)
        self._news.set()
        self.log.lock.notify_all()

    def _tell_lost(self, shared: Shared) -> None:
        """Tell the listener, in its thread; the partition may be claimed after that."""
        try:
            self._listener.lost(shared)
        finally:
            with self.log.lock:
                self._losing[shared] -= 1
                if not self._losing[shared]:
                    del self._losing[shared]
                self._news.set()

    def _drop_all(self) -> None:
        for shared in list(self._kept):
            self._drop(shared, is_lost=True)
