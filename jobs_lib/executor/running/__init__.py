"""Run claimed jobs: on threads, and on an event loop."""

from __future__ import annotations
