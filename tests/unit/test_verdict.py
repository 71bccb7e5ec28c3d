"""The judge of re-exports finds each kind of error."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.figures import count_fullest
from tests.support.records import Seen
from tests.support.verdict import Sent, judge

TABLE = {"a": 1, "b": 2}
ONE_A_SECOND = [float(second) for second in range(300)]


def see(key, version, *, at=0.0, by=None, gone=False, partition=0):
    headers = {"ce_version": str(version)} | ({} if by is None else {"ce_reexport": by})
    value = None if gone else json.dumps({"version": version}).encode()
    return Seen(partition, 0, key, value, headers, at)


GOOD = [see("a", 1), see("b", 1), see("b", 2), see("gone", 1), see("gone", 2, gone=1)]


def find_faults(records):
    found = judge(records, TABLE)
    return found.missing, found.alive, found.backwards, found.scattered


def test_a_topic_that_shows_the_table_has_no_fault():
    assert find_faults(GOOD) == ([], [], [], [])


def test_a_key_without_a_record_or_with_an_older_one_is_missing():
    assert find_faults(GOOD[1:])[0] == ["a"]
    assert find_faults([*GOOD[:2], *GOOD[3:]])[0] == ["b"]
    assert find_faults([*GOOD, see("a", 2, gone=True)])[0] == ["a"]
    # The header alone does not count.
    other = replace(GOOD[2], value=b'{"version": 1}')
    assert find_faults([*GOOD[:2], other, *GOOD[3:]])[0] == ["b"]


def test_an_orphan_without_a_tombstone_is_alive():
    assert find_faults(GOOD[:-1])[1] == ["gone"]
    assert find_faults([*GOOD, see("gone", 3)])[1] == ["gone"]


def test_a_version_that_goes_back_is_found_also_if_it_comes_again():
    assert find_faults([*GOOD, see("b", 1), see("b", 2)])[2] == ["b"]
    assert find_faults([*GOOD[:3], see("gone", 2), see("gone", 1, gone=1)])[2] == [
        "gone"
    ]


def test_a_tombstone_without_a_version_ends_its_key_and_hides_no_older_state():
    bare = replace(GOOD[4], key="b", headers={})
    assert find_faults([*GOOD, bare])[0] == ["b"]
    assert find_faults([*GOOD, bare, see("b", 1), see("b", 2)])[2] == ["b"]
    # A state without the header has the version of its value.
    plain = replace(see("b", 1), headers={})
    assert find_faults([*GOOD, plain, see("b", 2)])[2] == ["b"]


def test_a_key_in_two_partitions_is_found():
    assert find_faults([*GOOD, see("a", 1, partition=1)])[3] == ["a"]


def test_records_and_repeats_count_for_their_own_re_export():
    sent = [see("a", 1, by="1"), see("a", 1, by="1"), see("b", 2, by="1")]
    # Live records, and those of another re-export, repeat nothing.
    other = [see("b", 2), see("b", 2, by="2")]
    assert judge(sent + other, TABLE).sent == {"1": Sent(3, 1, 3), "2": Sent(1, 0, 1)}


def test_the_fullest_minute_may_begin_at_any_record():
    assert count_fullest([]) == 0
    assert count_fullest(ONE_A_SECOND) == 60
    burst = sorted([*ONE_A_SECOND, *[90.5] * 7, *[149.7] * 5])
    assert count_fullest(burst) == 72
    # 60 seconds after a record another minute begins.
    assert count_fullest([0.0, 60.0]) == 1
    late = [see(str(at), 1, at=at, by="1") for at in reversed(burst)]
    assert judge(late, {}).sent["1"].fullest == 72
