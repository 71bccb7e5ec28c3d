"""Tests of what an operator does with jobs."""
