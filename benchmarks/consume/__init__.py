"""Consumers: from a topic to a table, beside others that do the same.

The programs in ``loops`` run in environments without this library, so this package and
those programs import only what is installed there.
"""
