"""The consumers that others would write or take, each a program of its own."""
