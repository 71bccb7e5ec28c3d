"""Tests of an operator's actions on jobs."""
