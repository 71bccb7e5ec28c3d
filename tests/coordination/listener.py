"""Another reader of the log, written from PROTOCOL.md alone.

It shares no code with the library: tests compare the two. Names are those of the page.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

COMMON = {"v", "type", "n", "group_id", "client_id", "instance_id"}
FIELDS: dict[str, set[str]] = {
    "ClaimingPartition": {"topic", "partition", "interval_ms"},
    "Heartbeat": {"topic", "partition", "claim", "position"},
    "ClaimingMessages": {"topic", "partition", "claim", "first", "end"},
    "ReleasingPartition": {"topic", "partition", "claim", "position"},
    "ReleaseGroup": {"msg_expire_time"},
    "Probe": set(),
    "Snapshot": {
        "as_of", "time_ms", "part", "parts", "digest", "entries", "pauses",
    },
}  # fmt: skip
OFFSET = (0, 2**63 - 1)
NUMBERS = {
    "partition": (0, 2**31 - 1), "interval_ms": (100, 3_600_000), "claim": OFFSET,
    "position": OFFSET, "first": OFFSET, "end": OFFSET, "as_of": OFFSET,
    "time_ms": OFFSET, "part": OFFSET, "parts": OFFSET, "msg_expire_time": OFFSET,
    "n": (1, 2**31 - 1),
}  # fmt: skip
LENGTHS = {"group_id": 200, "client_id": 200, "instance_id": 200, "topic": 249}
TEXTS = {"digest", "entries", "pauses"}


def parse(value: bytes | None) -> dict[str, Any] | None:
    """Return the fields of a record that is a message of version 1, or None."""
    try:
        # Strict UTF-8 has no surrogates; a byte order mark is no JSON.
        text = (value or b"").decode("utf-8")
        fields = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not all(map(is_allowed, fields.values())):
        return None
    if any(has_surrogates(one) for item in fields.items() for one in item):
        return None
    if not fields.keys() >= COMMON or not is_number(fields["v"]) or fields["v"] != 1:
        return None
    kind = fields["type"]
    if not isinstance(kind, str) or kind not in FIELDS:
        return None
    wanted = (COMMON | FIELDS[kind]) - {"v", "type"}
    if not fields.keys() >= wanted:
        return None
    return fields if all(is_sound(one, fields[one]) for one in wanted) else None


def find_interval(probe: dict[str, Any]) -> int | None:
    """Section 3: the `interval_ms` of a `Probe`; None where it is as if missing."""
    told = probe.get("interval_ms")
    return told if is_sound("interval_ms", told) else None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object in which each field comes once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def is_allowed(value: Any) -> bool:
    """Whether a field may have such a value, known or not."""
    if is_number(value):
        return -(2**63) < value < 2**63
    return value is None or isinstance(value, str | bool)


def is_number(value: Any) -> bool:
    """Whether it is an integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def has_surrogates(value: Any) -> bool:
    """Whether half a character was escaped in a text."""
    return isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value)


def is_sound(name: str, value: Any) -> bool:
    """Whether a field is of its type and within its bounds."""
    if name in LENGTHS:
        return isinstance(value, str) and 1 <= len(value) <= LENGTHS[name]
    if name in TEXTS:
        return isinstance(value, str)
    if value is None:
        return name in ("position", "first")
    least, most = NUMBERS[name]
    return is_number(value) and least <= value <= most


def find_place(topic: str, partition: int, n: int) -> int:
    """Section 1."""
    data, m = f"{topic}/{partition}".encode(), 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    for i in range(0, len(data) - 3, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m % 2**32
        k = (k ^ k >> 24) * m % 2**32
        h = h * m % 2**32 ^ k
    if tail := data[len(data) - len(data) % 4 :]:
        h = (h ^ int.from_bytes(tail, "little")) * m % 2**32
    h = (h ^ h >> 13) * m % 2**32
    return ((h ^ h >> 15) & 0x7FFFFFFF) % n


class Listener:
    """What one partition of the log has said."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.time = 0
        self.n: int | None = None
        self.positions: dict[tuple[Any, ...], int | None] = {}
        self.holders: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.pauses: dict[str, tuple[int, tuple[str, str]]] = {}

    def hear(self, offset: int, append_time: int, value: bytes | None) -> None:
        """Section 4."""
        self.time = max(self.time, append_time)
        it = parse(value)
        if it is None:
            return
        if self.n is None:
            self.n = it["n"]
        if it["n"] != self.n:
            return
        who = (it["client_id"], it["instance_id"])
        if it["type"] == "ReleaseGroup":
            self.pauses[it["group_id"]] = (it["msg_expire_time"], who)
        if it["type"] in ("ReleaseGroup", "Probe", "Snapshot"):
            return
        if find_place(it["topic"], it["partition"], self.n) != self.place:
            return
        about = (it["group_id"], it["topic"], it["partition"])
        until, pauser = self.pauses.get(it["group_id"], (0, None))
        paused = self.time < until
        holder = self.holders.get(about)
        if it["type"] == "ClaimingPartition":
            if (not paused or pauser == who) and self.may_take(holder, who):
                self.positions.setdefault(about, None)
                self.holders[about] = {
                    "who": who, "claim": offset, "interval": it["interval_ms"],
                    "last": self.time, "confirmed": False,
                }  # fmt: skip
            return
        if holder is None or (holder["who"], holder["claim"]) != (who, it["claim"]):
            return
        known = self.positions[about]
        if it["type"] == "ClaimingMessages":
            if paused or not holder["confirmed"]:
                return
            if it["first"] != known or it["end"] <= (known or 0):
                return
            told = it["end"]
        else:
            told = it["position"]
            free = it["type"] == "ReleasingPartition" and paused and pauser == who
            if told is None or (known is not None and told < known and not free):
                told = known
        self.positions[about] = told
        if it["type"] == "ReleasingPartition":
            del self.holders[about]
        else:
            holder.update(last=self.time, confirmed=True)

    def may_take(self, holder: dict[str, Any] | None, who: tuple[str, str]) -> bool:
        """Rule 1."""
        if holder is None:
            return True
        age = self.time - holder["last"]
        if age > 2 * holder["interval"]:
            return True
        restarted = holder["who"][0] == who[0] and holder["who"][1] != who[1]
        return restarted and age >= holder["interval"]


class Snapshots:
    """Section 8: puts the parts of snapshots together.

    Args:
        n: partitions of the log.
        first: the first offset that it still has.
    """

    def __init__(self, n: int, first: int = 0) -> None:
        self.n = n
        self.first = first
        self.open: dict[tuple[Any, ...], dict[int, str]] = {}
        """Texts of the parts that are there, by what these have in common."""

    def hear(self, offset: int, value: bytes | None) -> dict[str, Any] | None:
        """Return the snapshot of which this is the last part, if it counts."""
        it = parse(value)
        if it is None or it["type"] != "Snapshot" or it["n"] != self.n:
            return None
        if it["part"] >= it["parts"] or not self.first - 1 <= it["as_of"] < offset:
            return None
        it["partial"] = it.get("partial") is True
        names = sorted((COMMON | FIELDS["Snapshot"]) - {"part", "entries"})
        key = (it["partial"], *(it[one] for one in names))
        parts = self.open.setdefault(key, {})
        parts[it["part"]] = it["entries"]
        if len(parts) < it["parts"]:
            return None
        del self.open[key]
        it["entries"] = "".join(parts[one] for one in range(it["parts"]))
        text = it["entries"] + it["pauses"]
        if hashlib.sha256(text.encode()).hexdigest() != it["digest"]:
            return None
        it["entries"] = read_lines(it["entries"], ENTRY, 3)
        it["pauses"] = read_lines(it["pauses"], PAUSE, 1)
        return None if None in (it["entries"], it["pauses"]) else it


HELD = ["client_id", "instance_id", "claim", "interval_ms", "time_ms", "confirmed"]
ENTRY = ["group_id", "topic", "partition", "position", *HELD]
PAUSE = ["group_id", "msg_expire_time", "client_id", "instance_id"]


def read_lines(text: str, fields: list[str], about: int) -> list[list[Any]] | None:
    """Read lines of sound fields, of which the first ones differ; None for others."""
    *lines, rest = text.split("\n")
    try:
        found = [json.loads(one) for one in lines]
    except (ValueError, RecursionError):
        return None
    if rest or not all(is_line(one, fields) for one in found):
        return None
    return found if len({(*one[:about],) for one in found}) == len(found) else None


def is_line(line: Any, fields: list[str]) -> bool:
    """Whether a line has the fields, each within its bounds."""
    if not isinstance(line, list) or len(line) != len(fields):
        return False
    if any(has_surrogates(one) for one in line):
        return False
    if line[4:] == [None] * 6:
        line = line[:4]
    return all(
        isinstance(value, bool) if name == "confirmed" else is_sound(name, value)
        for name, value in zip(fields, line, strict=False)
    )


def begin(place: int, snapshot: dict[str, Any]) -> Listener:
    """Begin with a snapshot that counts; the record behind `as_of` comes next."""
    listener = Listener(place)
    listener.time, listener.n = snapshot["time_ms"], snapshot["n"]
    for group, topic, partition, position, *held in snapshot["entries"]:
        about = (group, topic, partition)
        listener.positions[about] = position
        if held[0] is not None:
            who, more = tuple(held[:2]), held[2:]
            names = ["who", "claim", "interval", "last", "confirmed"]
            listener.holders[about] = dict(zip(names, [who, *more], strict=True))
    for group, until, *pauser in snapshot["pauses"]:
        listener.pauses[group] = (until, (pauser[0], pauser[1]))
    return listener


def spell(listener: Listener) -> tuple[str, str]:
    """Spell the entries and pauses as two members spell them alike."""
    entries = []
    for about in sorted(listener.positions):
        held: list[Any] = [None] * 6
        if holder := listener.holders.get(about):
            held = [*holder["who"], *list(holder.values())[1:]]
        entries.append(spell_line([*about, listener.positions[about], *held]))
    pauses = [
        spell_line([group, until, *pauser])
        for group, (until, pauser) in sorted(listener.pauses.items())
        if listener.time < until
    ]
    return "".join(entries), "".join(pauses)


def spell_line(values: list[Any]) -> str:
    """Spell a line, with its end."""
    return "[" + ",".join(map(spell_value, values)) + "]\n"


def spell_value(value: Any) -> str:
    """Spell a value of a line."""
    if isinstance(value, str):
        return '"' + "".join(map(spell_character, value)) + '"'
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def spell_character(one: str) -> str:
    """Spell a character of a text."""
    names = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
    if one in '"\\' or one in names:
        return "\\" + names.get(one, one)
    code = ord(one)
    if 0x20 <= code < 0x7F:
        return one
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
