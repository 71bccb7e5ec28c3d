"""Work that goes on in a thread beside a test."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run this meanwhile, in a thread; it returns once its event is set."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Threads:
    """Threads that work beside a test, until the block ends.

    Args:
        works: each runs in a thread of its own, until :attr:`stopping` is set.
    """

    def __init__(self, works: Iterable[Callable[[], object]]) -> None:
        self.stopping = threading.Event()
        self._threads = [threading.Thread(target=work) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join()
