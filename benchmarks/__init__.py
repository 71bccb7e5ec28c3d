"""Measurements, side by side in one run; never a timed test."""

from __future__ import annotations
