"""The display of the running demo: a bar for each stage, a line for each event."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import psycopg
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jobs_lib import ReexportError, reexport
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from examples.flights.flights import Flight

LOOK_SECONDS = 0.5
STALLED_SECONDS = 120.0


@dataclass(frozen=True)
class Goal:
    """The numbers at the end."""

    flights: int
    changes: int
    aircraft: int
    arrivals: int

    @classmethod
    def of(cls, flights: list[Flight]) -> Goal:
        """Count them from the flights."""
        known = [flight for flight in flights if flight.tail is not None]
        return cls(
            len(flights),
            len(known),
            len({flight.tail for flight in known}),
            sum(flight.arrived for flight in known),
        )


@dataclass
class Numbers:
    """The progress, to show and to wait for. The checks do not use it."""

    produced: int = 0
    handled: int = 0
    told: int = 0
    board: int = 0
    again: int = 0
    again_total: int = 0
    again_ended: bool = False
    outbox: int = 0

    def reach(self, goal: Goal) -> bool:
        """Whether nothing is left to do."""
        return (
            self.handled >= goal.flights
            and self.told >= goal.arrivals
            and self.board >= goal.changes
            and not self.outbox
            and self.again_ended
        )


class Screen:
    """Bars and lines on a terminal; elsewhere only lines."""

    def __init__(self, console: Console) -> None:
        self.begun = time.monotonic()
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description:32}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            console=console,
        )
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """The seconds since the demo began."""
        return time.monotonic() - self.begun

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {text}")

    def show(self, name: str, completed: int, total: int) -> None:
        """Make or move a bar; print the line of a full bar once."""
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        bar = self._bars[name]
        full = self._progress.tasks[bar].finished
        self._progress.update(bar, completed=completed, total=total)
        if not full and total and completed >= total:
            self.say(f"{name}: {completed:,}")

    def show_numbers(self, numbers: Numbers, goal: Goal) -> None:
        """Move the bars of everything that runs."""
        self.show("flights produced", numbers.produced, goal.flights)
        self.show("flights handled", numbers.handled, goal.flights)
        self.show("arrivals told to the partner", numbers.told, goal.arrivals)
        self.show("states in the read model", numbers.board, goal.changes)
        if numbers.again_total:
            self.show("aircraft re-exported", numbers.again, numbers.again_total)


class Watch:
    """Reads the numbers while the services run."""

    def __init__(self, flights_url: str, board_url: str, log: Path) -> None:
        self.numbers = Numbers()
        self._flights = psycopg.connect(flights_url, autocommit=True)
        self._board = psycopg.connect(board_url, autocommit=True)
        self._database = Database(flights_url)
        self._log = log.open("rb")

    def look(self) -> Numbers:
        """Read the numbers now."""
        numbers = self.numbers
        numbers.handled = _count(self._flights, "select count(*) from handled")
        numbers.outbox = _count(self._flights, "select count(*) from jobs_lib.outbox")
        numbers.board = _count(self._board, "select sum(version) from aircraft_rm")
        numbers.told += sum(b'"repeat": false' in line for line in self._log)
        try:
            progress = reexport.status(self._database, "aircraft")
        except ReexportError:
            return numbers  # none has started yet
        numbers.again = progress.sent + progress.superseded
        numbers.again_total = progress.total
        numbers.again_ended = progress.ended
        return numbers

    def until(
        self, condition: Callable[[Numbers], bool], show: Callable[[Numbers], None]
    ) -> bool:
        """Look until the condition holds; False if nothing moves for two minutes."""
        last, moved_at = "", time.monotonic()
        while True:
            numbers = self.look()
            show(numbers)
            if condition(numbers):
                return True
            if str(numbers) != last:
                last, moved_at = str(numbers), time.monotonic()
            elif time.monotonic() - moved_at > STALLED_SECONDS:
                return False
            time.sleep(LOOK_SECONDS)


def _count(connection: psycopg.Connection[Any], query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    return int(row[0] or 0) if row else 0
