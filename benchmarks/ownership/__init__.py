"""Ownership: how fast it moves, and that whoever has lost it does no harm."""
