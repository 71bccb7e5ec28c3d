"""Tests of the re-export without Spark."""

from __future__ import annotations
