"""An application's pools, which several threads and event loops use at once."""

from __future__ import annotations

from typing import Any, cast

from jobs_lib.callers.pools import Pools, _LoopPool


def test_loops_of_other_threads_get_their_pools_while_ended_ones_are_looked_for():
    pools = Pools(lambda: cast("Any", None))
    given = cast("dict[Any, _LoopPool]", pools._async_pools)
    pool = _LoopPool(0, cast("Any", None), cast("Any", set()))

    class Loop:
        is_over = False

        def is_closed(self) -> bool:
            if len(given) == 2:
                # Another thread begins just now.
                given[Loop()] = pool
            return self.is_over

    first, second = Loop(), Loop()
    second.is_over = True
    given |= {first: pool, second: pool}
    pools._end_unused()
    assert len(given) == 2
    assert second not in given
