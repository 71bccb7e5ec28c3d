"""A proof of the relay from outside: commits, records, and the verdict on both.

Nothing here asks the library: the commits are read from PostgreSQL's log and the
records from the topics. The judge is a function of the two.
"""

from __future__ import annotations
