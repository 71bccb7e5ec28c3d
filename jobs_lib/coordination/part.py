"""A partition that is held, with the records that wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING

from jobs_lib.coordination.record import count_bytes

if TYPE_CHECKING:
    from confluent_kafka import Message

    from jobs_lib.coordination.messages import Shared
    from jobs_lib.coordination.patience import Patience
    from jobs_lib.coordination.writer import Sent
    from jobs_lib.kafka.poller import Partition

_find_offset = methodcaller("offset")


class Part:
    """A partition that is held, with the records that wait.

    They wait in the lots in which they arrived, and a lot is dropped as a whole.
    """

    def __init__(self, shared: Shared, position: int | None) -> None:
        self.shared = shared
        self.position = position
        """Where the next batch begins; None for the oldest record there is."""
        self.waiting_bytes = 0
        """Of all weighed lots of which a record waits."""
        self.next_fetch: int | None = position
        """The offset behind the last record that arrived."""
        self.is_begun = False
        """Whether it is to be read."""
        self.is_read = False
        """Whether records that arrive are those from the position on."""
        self.is_paused = False
        """Whether it has enough records, and gets no more for now."""
        self.range: tuple[int, int] | None = None
        """Which offsets have records, if :attr:`next_fetch` has none."""
        self.is_standing = False
        """Whether it stands still until an operator sets its position."""
        self.is_leaving = False
        self.is_lost = False
        self.is_queued = False
        """Whether it waits for its turn."""
        self.failures = 0
        self.retry_at = 0.0
        self.claim: tuple[Sent, list[Message]] | None = None
        """The claim of a batch that nobody knows to be in the log or not."""
        self.patience: Patience | None = None
        """For how long that has had no answer."""
        self._lots: deque[tuple[list[Message], int]] = deque()
        """Records with their bytes; 0 until they are weighed."""
        self._first = 0
        """Which record of the first lot is the first that waits."""

    @property
    def partition(self) -> Partition:
        """As Kafka's client names it."""
        return self.shared.topic, self.shared.partition

    @property
    def origin(self) -> str:
        """The partition as ``topic/partition``."""
        return self.shared.origin

    @property
    def flowing_bytes(self) -> int:
        """The bytes that wait if more may come, and else 0."""
        return 0 if self.is_paused else self.waiting_bytes

    @property
    def has_work(self) -> bool:
        """Whether there is something to do in its turn."""
        is_over = self.is_standing or self.is_leaving or self.is_lost
        is_open = not self.is_begun or self.range is not None
        return not is_over and (is_open or bool(self._lots))

    def begin(self) -> None:
        """Wait for the records from the position on, also if these have come before."""
        self._lots.clear()
        self._first = self.waiting_bytes = 0
        self.next_fetch = self.position
        self.read_on()

    def read_on(self) -> None:
        """Wait for the records behind those that have come."""
        self.is_begun, self.is_read, self.is_paused = True, False, False
        self.range = None

    def push(self, messages: list[Message]) -> None:
        """Add records that have arrived, in their order."""
        wanted = self.next_fetch
        if wanted is not None and _find_offset(messages[0]) < wanted:
            messages = messages[_search(messages, wanted, 0) :]
            if not messages:
                return
        self.next_fetch = _find_offset(messages[-1]) + 1
        self._lots.append((messages, 0))

    def pause(self, most: int) -> None:
        """Take no more records, and let those go that are above so many bytes."""
        # What is on its way lies behind those that are let go. They are asked for
        # again, and the broker says then whether they are still there.
        self.is_paused, self.is_read, self.range = True, False, None
        while self.waiting_bytes > most and len(self._lots) > 1:
            messages, size = self._lots.pop()
            self.waiting_bytes -= size
            self.next_fetch = _find_offset(messages[0])

    def weigh(self) -> None:
        """Count the bytes of all that waits."""
        for number in range(len(self._lots) - 1, -1, -1):
            messages, size = self._lots[number]
            if size:
                break
            size = count_bytes(messages)
            self._lots[number] = messages, size
            self.waiting_bytes += size

    def peek(self, count: int) -> list[Message]:
        """Return the first records that wait."""
        found: list[Message] = []
        first = self._first
        for messages, _ in self._lots:
            found += messages[first : first + count - len(found)]
            if len(found) == count:
                break
            first = 0
        return found

    def drop(self, before: int) -> None:
        """Drop the waiting records before an offset, which is the position now."""
        self.position = before
        self.next_fetch = max(before, self.next_fetch or 0)
        while self._lots:
            messages, size = self._lots[0]
            if _find_offset(messages[-1]) >= before:
                self._first = _search(messages, before, self._first)
                return
            self._lots.popleft()
            self._first = 0
            self.waiting_bytes -= size


def _search(messages: list[Message], offset: int, first: int) -> int:
    """Find the first record that does not lie before an offset."""
    return bisect_left(messages, offset, first, key=_find_offset)
