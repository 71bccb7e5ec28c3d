"""Random logs: few names and small numbers, so that records meet each other."""

from __future__ import annotations

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
    encode,
    find_place,
)

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
times = st.sampled_from([0, 0, 0, 50, 99, 100, 101, 200, 201, -150])
numbers = st.one_of(st.integers(-2, 3), st.sampled_from([2**31, 2**63, 10**30, 1.0]))


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw a record that some member may have sent."""
    sender = draw(senders)
    shared = Shared(sender.group_id, *draw(places))
    message: Message
    kind = draw(st.sampled_from([0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 5]))
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
    else:
        message = Probe(sender)
    return encode(message, draw(st.sampled_from([PLACES] * 19 + [3])))


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
                (b'"type":"H', b'"type":"h'), (b'"end":', b'"end":9223372036854775808'),
            ]
        )
    )  # fmt: skip
    return value.replace(old, new, 1)


values = st.one_of([messages()] * 8 + [broken()])


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Draw a log: offset, append time and value of each record."""
    found, time = [], START_MS
    for offset, value in enumerate(draw(st.lists(values, max_size=40))):
        time += draw(times)
        found.append((offset, time, value))
    return found


@st.composite
def living_logs(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Draw a log in which most records are about the last claim of a partition."""
    found, time, offset = [], START_MS, 0
    last: dict[Shared, tuple[Sender, int]] = {}
    for value in draw(st.lists(values, max_size=12)):
        time += draw(times)
        found.append((offset, time, value))
        offset += 1
        sender = draw(senders)
        shared = Shared(sender.group_id, *HERE[0])
        if draw(st.booleans()):
            found.append(
                (offset, time, encode(ClaimingPartition(sender, shared, 100), PLACES))
            )
            last[shared] = sender, offset
            offset += 1
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
            found.append((offset, time, encode(message, PLACES)))
            offset += 1
    return found


all_logs = logs() | living_logs()
