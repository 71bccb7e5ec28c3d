"""Tests of the web apps."""

from __future__ import annotations
