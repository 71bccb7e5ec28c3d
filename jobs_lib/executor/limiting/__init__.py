"""Types of which only so many jobs run at once, over all pods."""

from __future__ import annotations
