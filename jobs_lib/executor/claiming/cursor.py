"""How far claims have looked at each owned origin, and how wide to look next."""

from __future__ import annotations

from dataclasses import dataclass, field

WIDEST = 100_000
"""Rows that one jump may read."""


@dataclass(slots=True)
class Descent:
    """A look down through the ids of an origin, in as many slices as needed.

    While it goes on, ``floor < at <= top``, and ``top`` is not above the cursor.
    """

    top: int = 0
    """The id at which it began."""
    at: int = 0
    """The highest id still to look at; 0 when it has ended."""
    floor: int = 0
    """The id at which it ends."""
    wanted: int | None = None
    """The id down to which the next one must go; None if there is nothing to find."""

    def want(self, floor: int) -> None:
        """Something new may be above ``floor``: the next one finds it."""
        self.wanted = floor if self.wanted is None else min(self.wanted, floor)

    @property
    def goes_on(self) -> bool:
        """Whether there is something left to look at."""
        return self.at > 0 or self.wanted is not None

    def begin(self, cursor: int) -> int:
        """Go on, or begin at the cursor; return the highest id to look at."""
        if not self.at and self.wanted is not None:
            self.top = self.at = cursor
            self.floor, self.wanted = min(self.wanted, cursor), None
        return self.at

    def choose_start(self, span: int) -> int:
        """The id behind which the next slice begins.

        Args:
            span: minimum number of ids in a slice.
        """
        # Each slice is as long as all before it: old ids have large gaps between them.
        return max(self.floor, self.at - max(span, self.top - self.at))

    def reach(self, end: int, reached: int) -> None:
        """All rows between these ids have been looked at; ``end`` is the higher one."""
        # If the cursor was rewound meanwhile, this is another descent.
        if self.at == end:
            self.at = reached if reached > self.floor else 0


@dataclass(slots=True)
class Cursor:
    """How far one origin has been looked at.

    Its marks are ids, and at all times

        ``swept_below <= sweep_target <= no_commits_below <= at``

    During a pass of the sweep, ``swept_below < sweep_at <= sweep_target``; otherwise
    ``sweep_at`` is 0. The two descents keep the invariant of :class:`Descent`. So the
    sweep never looks at ids that windows have not reached, and no ids count as swept
    while a row can still appear among them.

    Only a rewind lowers ``at`` and ``no_commits_below``; it sets all marks to 0 at
    once.
    """

    epoch: int
    at: int = 0
    """The highest id looked at, among jobs of normal priority."""
    levels: dict[int, int] = field(default_factory=lambda: {1: 0, -1: 0})
    """The same for the other priorities."""
    swept_below: int = 0
    """Up to it no row can still appear, and every late row was found."""
    no_commits_below: int = 0
    """Up to it no row can still appear: every transaction that could add one ended."""
    sweep_target: int = 0
    """The value of `no_commits_below` when the current pass began."""
    sweep_at: int = 0
    """The highest id that the pass must still look at; 0 when it has ended."""
    near: Descent = field(default_factory=Descent)
    """The sweep's look near the cursor."""
    far: Descent = field(default_factory=Descent)
    """The sweep's look down to where a longer transaction began."""
    seen: bool = False
    """Whether a poll since the take-over has read the pauses; no claim comes before."""
    may_have_more: bool = False
    """Whether there may be more behind the cursor."""
    all_plain: bool = True
    """Whether the last rows were plain: see the query ``claim_plain``."""
    jump_factor: int = 1
    """Above 1, nothing could run lately: a jump may pass over this many windows."""
    urgent: bool = False
    """Whether there was more at the highest priority than the last claim looked at."""
    left_out: int = 0
    """Claims since the last one that looked at the lowest priority, too."""
    found: bool = False
    """Whether the last claim has found anything."""
    leaving: bool = False
    """Whether the origin is being released: nothing more is claimed."""

    def rewind(self) -> None:
        """Start again: jobs that were passed over may run now."""
        self.at = self.no_commits_below = 0
        self.swept_below = self.sweep_target = self.sweep_at = 0
        self.levels = {1: 0, -1: 0}
        self.near, self.far = Descent(), Descent()
        self.may_have_more, self.jump_factor = True, 1

    # The marks

    def advance(self, furthest: int) -> None:
        """All rows up to this id have been looked at."""
        self.at = max(self.at, furthest)

    def close(self, mark: int) -> None:
        """Up to this id no row can still appear."""
        # The sweep ignores ids above the cursor.
        mark = min(mark, self.at)
        self.no_commits_below = max(self.no_commits_below, mark)

    @property
    def is_ripe(self) -> bool:
        """Whether the sweep still has ids to look at for a last time."""
        return self.swept_below < self.no_commits_below

    def begin_pass(self) -> int:
        """Go on, or begin at the mark; return the highest id to look at."""
        if not self.sweep_at:
            self.sweep_at = self.sweep_target = self.no_commits_below
        return self.sweep_at

    def choose_start(self, span: int) -> int:
        """The id behind which the next slice of the pass begins.

        Args:
            span: minimum number of ids in a slice.
        """
        # As in a descent.
        below = max(span, self.sweep_target - self.sweep_at)
        return max(self.swept_below, self.sweep_at - below)

    def reach(self, end: int, reached: int) -> None:
        """The pass has looked at all rows between these ids; ``end`` is the higher one.

        When it has ended, everything up to its target is swept.
        """
        # If the cursor was rewound meanwhile, that pass is over.
        if self.sweep_at != end:
            return
        self.sweep_at = reached if reached > self.swept_below else 0
        if not self.sweep_at:
            self.swept_below = self.sweep_target

    def sweep_all_again(self) -> None:
        """Sweep from the start: somebody may have changed rows by hand."""
        # A pass that takes longer than this goes on, or it would never end.
        if not self.sweep_at:
            self.swept_below = 0
