"""Tests of the re-export on Spark."""

from __future__ import annotations
