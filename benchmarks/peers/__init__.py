"""The libraries measured side by side, this one and others of its kind, by adapters.

Every adapter is a program of its own, and all have the same commands: see ``adapter``.
This package and ``adapter`` need only the standard library: the Python peers run in an
environment without ours.
"""

from __future__ import annotations
