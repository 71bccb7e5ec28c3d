"""The board: another service, which shows where each order stands."""

from __future__ import annotations
