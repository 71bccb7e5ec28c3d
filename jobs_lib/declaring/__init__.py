"""The declarations of an app, in a module for each kind."""

from __future__ import annotations

from jobs_lib.declaring.jobs import JobDeclarations
from jobs_lib.declaring.streams import StreamDeclarations
from jobs_lib.declaring.topics import TopicDeclarations
from jobs_lib.declaring.transactions import TransactionDeclarations

__all__ = [
    "JobDeclarations",
    "StreamDeclarations",
    "TopicDeclarations",
    "TransactionDeclarations",
]
