"""How far each owned origin has been looked at, and how wide to look next."""

from __future__ import annotations

from dataclasses import dataclass, field

WIDEST = 100_000
"""Rows that one jump may read."""


@dataclass(slots=True)
class Descent:
    """A look down through the ids of an origin, in as many slices as it takes.

    While it goes on, ``floor < at <= top``, and ``top`` is not above the cursor.
    """

    top: int = 0
    """Where it began."""
    at: int = 0
    """Up to where it still has to look; 0 when it has ended."""
    floor: int = 0
    """Where it ends."""
    wanted: int | None = None
    """Down to where the next one is to go; None if there is nothing to look for."""

    def want(self, floor: int) -> None:
        """There may be something new above ``floor``: the next one finds it."""
        self.wanted = floor if self.wanted is None else min(self.wanted, floor)

    @property
    def goes_on(self) -> bool:
        """Whether there is something left to look at."""
        return self.at > 0 or self.wanted is not None

    def begin(self, cursor: int) -> int:
        """Go on, or begin at the cursor; returns the highest id to look at."""
        if not self.at and self.wanted is not None:
            self.top = self.at = cursor
            self.floor, self.wanted = min(self.wanted, cursor), None
        return self.at

    def choose_start(self, span: int) -> int:
        """Behind which id the next slice begins.

        Args:
            span: ids that a slice has at least.
        """
        # Each slice as long as all before it: there are large gaps between old ids.
        return max(self.floor, self.at - max(span, self.top - self.at))

    def reach(self, end: int, reached: int) -> None:
        """All between these ids has been looked at, ``end`` the higher one."""
        # Where the cursor was rewound meanwhile, this is another descent.
        if self.at == end:
            self.at = reached if reached > self.floor else 0


@dataclass(slots=True)
class Cursor:
    """How far one origin has been looked at.

    Its marks are ids, and at all times

        ``swept_below <= sweep_target <= no_commits_below <= at``

    While a pass of the sweep goes on, ``swept_below < sweep_at <= sweep_target``;
    else ``sweep_at`` is 0. The two descents keep what :class:`Descent` says. So the
    sweep never looks at what windows have still to come to, and nothing counts as swept
    in which a row can still appear.

    Of the marks only a rewind lowers ``at`` and ``no_commits_below``; it makes all of
    them 0 at once.
    """

    epoch: int
    at: int = 0
    """The highest id that was looked at, of the jobs of normal priority."""
    levels: dict[int, int] = field(default_factory=lambda: {1: 0, -1: 0})
    """The same for the other priorities."""
    swept_below: int = 0
    """Up to it no row can still appear, and all that did so late were found."""
    no_commits_below: int = 0
    """Up to it no row can still appear: every transaction that could add one ended."""
    sweep_target: int = 0
    """What `no_commits_below` was when the pass began that the sweep is at."""
    sweep_at: int = 0
    """Up to where that pass still has to look; 0 when it has ended."""
    near: Descent = field(default_factory=Descent)
    """The sweep's look near the cursor."""
    far: Descent = field(default_factory=Descent)
    """Its look down to where a transaction began that was open for longer."""
    seen: bool = False
    """Whether a look since the take-over has told what is paused; no claim before."""
    may_have_more: bool = False
    """Whether there may be more behind the cursor."""
    all_plain: bool = True
    """Whether what came last was plain: see the query ``claim_plain``."""
    jump_factor: int = 1
    """Above 1 nothing could run lately: so many windows are jumped over, if need be."""
    urgent: bool = False
    """Whether there was more of the highest priority than the last claim looked at."""
    left_out: int = 0
    """Claims since the last one that looked at the lowest priority, too."""
    found: bool = False
    """Whether the last claim has found anything."""
    leaving: bool = False
    """Whether it is being given back: nothing more is claimed."""

    def rewind(self) -> None:
        """Start again: what was passed over may run now."""
        self.at = self.no_commits_below = 0
        self.swept_below = self.sweep_target = self.sweep_at = 0
        self.levels = {1: 0, -1: 0}
        self.near, self.far = Descent(), Descent()
        self.may_have_more, self.jump_factor = True, 1

    # The marks

    def advance(self, furthest: int) -> None:
        """All up to this id has been looked at."""
        self.at = max(self.at, furthest)

    def close(self, mark: int) -> None:
        """Up to this id no row can still appear."""
        # What lies above the cursor is not the sweep's business.
        mark = min(mark, self.at)
        self.no_commits_below = max(self.no_commits_below, mark)

    @property
    def is_ripe(self) -> bool:
        """Whether the sweep has something to look at once more, and for good."""
        return self.swept_below < self.no_commits_below

    def begin_pass(self) -> int:
        """Go on, or begin at the mark; returns the highest id to look at."""
        if not self.sweep_at:
            self.sweep_at = self.sweep_target = self.no_commits_below
        return self.sweep_at

    def choose_start(self, span: int) -> int:
        """Behind which id the next slice of the pass begins.

        Args:
            span: ids that a slice has at least.
        """
        # As in a descent.
        below = max(span, self.sweep_target - self.sweep_at)
        return max(self.swept_below, self.sweep_at - below)

    def reach(self, end: int, reached: int) -> None:
        """The pass has looked at all between these ids, ``end`` the higher one.

        When it has ended, all up to its target is swept.
        """
        # Where the cursor was rewound meanwhile, that pass is over.
        if self.sweep_at != end:
            return
        self.sweep_at = reached if reached > self.swept_below else 0
        if not self.sweep_at:
            self.swept_below = self.sweep_target

    def sweep_all_again(self) -> None:
        """Sweep from the start: somebody may have changed rows by hand."""
        # A pass that takes so long goes on, or it would never end.
        if not self.sweep_at:
            self.swept_below = 0
