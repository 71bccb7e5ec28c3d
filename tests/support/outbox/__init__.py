"""A proof of the relay from outside: what was committed, what arrived, the verdict.

Nothing here asks the library: commits are read from PostgreSQL's log, records from the
topics, and the judge is a function of the two.
"""

from __future__ import annotations
