"""What a member has to do with a partition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs_lib.coordination.claims import Hold


@dataclass
class Kept:
    """A partition that a member claims or holds."""

    hold: Hold
    position: int | None = None
    """All before it is processed."""
    sent_at: float = 0.0
    """When the last record about it was sent."""
    sure_at: float = -math.inf
    """When the last one was sent that was read back as valid."""
    has_ousted: bool = False
    """Whether the holder before had let nothing be heard of it."""
    is_leaving: bool = False
    is_releasing: bool = False
