"""Which jobs are claimed next: decides, and sends nothing."""

from __future__ import annotations
