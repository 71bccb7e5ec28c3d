"""The command ``jobs-lib``: parse, call one function, print; a file for each noun."""

from __future__ import annotations
