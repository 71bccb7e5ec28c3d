"""Measurements, side by side in one run; none of them is a timed test."""

from __future__ import annotations
