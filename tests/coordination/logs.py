"""Random logs: few names and small numbers, so that records meet each other.

Some records are snapshots of what the log has said until then, whole and broken.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Snapshot,
    encode,
    find_place,
)
from jobs_lib.coordination.snapshots import split
from jobs_lib.coordination.world import World, find_digest

PLACES = 2
TOPICS = ("orders", "mails")
HERE = [
    (topic, partition)
    for topic in TOPICS
    for partition in range(4)
    if find_place(topic, partition, PLACES) == 0
][:2]
ELSEWHERE = next(
    (topic, partition)
    for topic in TOPICS
    for partition in range(4)
    if find_place(topic, partition, PLACES) == 1
)
START_MS = 1_000
LINE = f'["shop.a","{HERE[0][0]}",{HERE[0][1]},2,"x","1",1,100,900,true]\n'
PAUSE = '["shop.b",1200,"y","1"]\n'

senders = st.builds(
    Sender,
    st.sampled_from(["shop.a", "shop.a", "shop.b"]),
    st.sampled_from(["x", "y"]),
    st.sampled_from(["1", "1", "2"]),
)
places = st.sampled_from([HERE[0]] * 6 + [HERE[1]] * 2 + [ELSEWHERE])
claims = st.integers(0, 12)
positions = st.none() | st.integers(0, 6)
intervals = st.sampled_from([100, 100, 200])
told_intervals: st.SearchStrategy[Any] = st.sampled_from([None, 5, 500, "x"])
"""Of probes: a sound one, and others that mean nothing."""
times = st.sampled_from([0, 0, 0, 50, 99, 100, 101, 200, 201, -150])
numbers = st.one_of(st.integers(-2, 3), st.sampled_from([2**31, 2**63, 10**30, 1.0]))


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw a record that some member may have sent."""
    sender = draw(senders)
    shared = Shared(sender.group_id, *draw(places))
    message: Message
    kind = draw(st.sampled_from([0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 6]))
    if kind == 0:
        message = ClaimingPartition(sender, shared, draw(intervals))
    elif kind == 1:
        message = Heartbeat(sender, shared, draw(claims), draw(positions))
    elif kind == 2:
        message = ReleasingPartition(sender, shared, draw(claims), draw(positions))
    elif kind == 3:
        message = ClaimingMessages(
            sender, shared, draw(claims), draw(positions), draw(st.integers(0, 7))
        )
    elif kind == 4:
        message = ReleaseGroup(sender, START_MS + draw(st.integers(0, 900)))
    elif kind == 5:
        message = Probe(sender, draw(st.booleans()), draw(told_intervals))
    else:
        message = draw(foreign_parts(sender))
    return encode(message, draw(st.sampled_from([PLACES] * 19 + [3])))


@st.composite
def foreign_parts(draw: st.DrawFn, sender: Sender) -> Snapshot:
    """Draw a part of a snapshot that the log knows nothing of."""
    entries = draw(st.sampled_from(["", LINE, LINE.replace("2,", "3,", 1)]))
    return Snapshot(
        sender,
        as_of=draw(st.integers(0, 8)),
        time_ms=START_MS + draw(st.integers(-500, 500)),
        part=draw(st.sampled_from([0, 0, 0, 1])),
        parts=draw(st.sampled_from([1, 1, 1, 2, 0])),
        digest=find_digest([entries], PAUSE) if draw(st.booleans()) else "no digest",
        entries=entries,
        pauses=PAUSE,
        partial=draw(st.booleans()),
    )


ODD = [b"5", b"1", b'"true"', b'"true"', b"null", b"[]", b"{}", b"1.0", b"true"]
"""What may stand where `true` or `false` is wanted."""


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Draw a record that is nearly a message: a piece of it is exchanged."""
    value = draw(messages())
    old, new = draw(
        st.sampled_from(
            [
                (b'"v":1', b'"v":2'), (b'"v":1', b'"v":1.0'), (b'"v":1', b'"v":true'),
                (b'"v":1', b'"v":1,"v":1'), (b'"v":1', b'"v":1,"w":[]'),
                (b'"v":1', b'"v":1,"w":1e5'), (b'"v":1', b'"v":1,"w":NaN'),
                (b'"v":1', b'"v":1,"w":true'), (b'"v":1', b'"v":1,"w":"\\""'),
                (b'"v":1', b'"v":1,"w":-9223372036854775808'),
                (b'"v":1', b'"v":1,"w":' + b"9" * 5_000),
                (b'"v":1', b'"v":-0'), (b'"v":1', b'"\\u0076":1'),
                (b'"v":1', b'"v":1,"w":' + b"[" * 300 + b"]" * 300),
                (b'"n":2', b'"n":0'), (b'"n":2', b'"n":null'), (b'"n":2', b'"n":02'),
                (b'"x"', b'"\\ud800"'), (b'"x"', b'"\\u0078"'), (b'"x"', b'""'),
                (b'"x"', b"1"), (b'"x"', b'"\xed\xa0\x80"'), (b'"x"', b'"\xff"'),
                (b'"x"', b'"' + "ä".encode() * 200 + b'"'),
                (b'"x"', b'"' + b"x" * 201 + b'"'), (b'"x"', b'"\\ud83d\\ude00"'),
                (b'"orders"', b'"\\u0000"'), (b"{", b"\xef\xbb\xbf{"),
                (b"{", b" {"), (b"}", b"}}"), (b"}", b"}\n"), (b"}", b',"y":{}}'),
                (b'"partition":', b'"partition":-'), (b'"claim":', b'"claim":1'),
                (b'"position":null', b'"position":false'), (b'"claim"', b'"claims"'),
                (b'"position":', b'"position":0'), (b'"position":', b'"position": '),
                (b'"position":', b'"position":12345678901234567'),
                (b'"position":', b'"position":1,"position":'),
                (b'"position":', b'"position":1,"x\\"position":'),
                (b'"position":', b'"w":1,"position":'), (b"}", b"_1}"), (b"}", b" }"),
                (b'"interval_ms":100', b'"interval_ms":99'),
                (b'"wants_snapshot":false', b'"v":1'), (b'"wants_snapshot":', b'"w":'),
                (b'"wants_snapshot":true', b'"wants_snapshot":1'),
                *((b'"partial":false', b'"partial":' + one) for one in ODD),
                (b',"partial":false', b""), (b'"as_of":', b'"as_of":-'),
                (b'"part":', b'"part":null,"p":'), (b'"parts":', b'"parts":"1","p":'),
                (b'"entries":', b'"entries":null,"e":'),
                (b'"digest":', b'"digest":1,"d":'),
                (b'"type":"H', b'"type":"h'), (b'"end":', b'"end":9223372036854775808'),
            ]
        )
    )  # fmt: skip
    return value.replace(old, new, 1)


values = st.one_of([messages()] * 8 + [broken()])


WRONG_LINES = [
    *(("100", "99"), (",true]", ",1]"), (",false]", ",null]"), ('"x"', '""')),
    *((",null]", ",true]"), (",null,", ",2,"), ("\n", ""), ("\n", "\n\n")),
    *(('"x"', '"\\ud800"'), ('"x"', '"\\ud83d\\ude00"'), ('"x"', "5"), ("[", "{")),
    *(("[", "[ "), ("]", ",1]"), ("]", "],"), (",0,", ",-0,"), (",0,", ",-1,")),
    *((",0,", ",0.0,"), (",1,", ",true,"), (",1,", ",NaN,"), ("\n", "\r\n")),
    *(('"orders"', f'"{"x" * 250}"'), ('"x"', f'"{"x" * 201}"'), (",1,", ",null,")),
]


@st.composite
def snapshots(
    draw: st.DrawFn, log: list[tuple[int, int, bytes]]
) -> list[tuple[int, int, bytes]]:
    """Draw the parts of a snapshot of a log, or of what it said a while before.

    Mostly it is right. Else a part is missing, is out of order or is broken, or all
    has the digest of lines that are none.
    """
    world = World(0)
    for record in log[: draw(st.integers(max(1, len(log) - 5), len(log)))]:
        world.apply(*record)
    sender = draw(senders)
    how = draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 5, 5, 5]))
    largest = draw(st.sampled_from([1, 100, 500])) if how != 5 else 100_000
    parts = list(split(world, sender, largest, is_partial=draw(st.booleans())))
    if how == 1:
        parts.pop(draw(st.integers(0, len(parts) - 1)))
    elif how == 2:
        parts.reverse()
    elif how == 3:
        parts.append(parts[0]._replace(entries=LINE))
        parts.reverse()
    elif how == 4:
        parts[-1] = parts[-1]._replace(entries=LINE)
    elif how == 5:
        old, new = draw(st.sampled_from([*WRONG_LINES, (LINE, LINE * 2)]))
        entries = parts[0].entries.replace(old, new, 1)
        pauses = parts[0].pauses.replace(old, new, 1)
        digest = find_digest([entries], pauses)
        parts = [parts[0]._replace(entries=entries, pauses=pauses, digest=digest)]
    time = log[-1][1]
    return [
        (len(log) + number, time, encode(part, PLACES))
        for number, part in enumerate(parts)
    ]


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Draw a log: offset, append time and value of each record."""
    found: list[tuple[int, int, bytes]] = []
    time = START_MS
    for value in draw(st.lists(values, max_size=40)):
        time += draw(times)
        found.append((len(found), time, value))
        if draw(st.sampled_from([False] * 15 + [True])):
            found += draw(snapshots(found))
    return found


mostly = st.sampled_from([True, True, True, False])


@st.composite
def pauses(
    draw: st.DrawFn, offset: int, holder: tuple[Sender, int] | None
) -> list[Message]:
    """Draw what is said of a partition while its group is paused, and behind that.

    Mostly the run that pauses the group claims the partition, and sets its position.

    Args:
        offset: of the first record.
        holder: who may hold the partition, and by which claim.
    """
    pauser, other = draw(senders), draw(senders)
    if holder is not None:
        pauser = pauser._replace(group_id=holder[0].group_id)
    if draw(mostly):
        other = pauser._replace(instance_id=draw(st.sampled_from(["1", "2"])))
    shared = Shared(pauser.group_id, *HERE[0])
    said: list[Message] = [
        ReleaseGroup(pauser, START_MS + draw(st.sampled_from([900, 9_000, 9_000])))
    ]
    if holder is not None and draw(mostly):
        said.append(ReleasingPartition(holder[0], shared, holder[1], draw(positions)))
    if draw(mostly):
        said.append(ClaimingPartition(other, shared, 100))
    if not draw(mostly):
        said.append(ReleaseGroup(pauser, START_MS + draw(st.integers(0, 900))))
    claim = offset + len(said)
    said.append(ClaimingPartition(pauser, shared, 100))
    if draw(mostly):
        said.append(Heartbeat(pauser, shared, claim, draw(positions)))
    said.append(ReleasingPartition(pauser, shared, claim, draw(positions)))
    return said


@st.composite
def living_logs(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Draw a log in which most records are about the last claim of a partition."""
    found: list[tuple[int, int, bytes]] = []
    time = START_MS
    last: dict[Shared, tuple[Sender, int]] = {}
    for value in draw(st.lists(values, max_size=12)):
        time += draw(times)
        found.append((len(found), time, value))
        if draw(st.sampled_from([False, False, True])):
            found += draw(snapshots(found))
        sender = draw(senders)
        shared = Shared(sender.group_id, *HERE[0])
        if draw(st.booleans()):
            last[shared] = sender, len(found)
            value = encode(ClaimingPartition(sender, shared, 100), PLACES)
            found.append((len(found), time, value))
        for _ in range(draw(st.integers(0, 3))):
            if shared not in last:
                continue
            time += draw(times)
            holder, claim = last[shared]
            position = draw(positions)
            choices: list[Message] = [
                Heartbeat(holder, shared, claim, position),
                Heartbeat(holder, shared, claim, None),
                ClaimingMessages(holder, shared, claim, position, 6),
                ClaimingMessages(holder, shared, claim, None, 1),
                ClaimingMessages(holder, shared, claim, 1, 3),
                ReleasingPartition(holder, shared, claim, position),
                ReleaseGroup(holder, time + 150),
            ]
            message = draw(st.sampled_from(choices))
            found.append((len(found), time, encode(message, PLACES)))
        if draw(st.booleans()):
            for message in draw(pauses(len(found), last.get(shared))):
                time += draw(times)
                found.append((len(found), time, encode(message, PLACES)))
    return found


all_logs = logs() | living_logs()
