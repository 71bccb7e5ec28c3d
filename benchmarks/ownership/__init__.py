"""Ownership: how fast it moves, and that a process that has lost it does no harm."""
