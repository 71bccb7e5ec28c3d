"""What an app declares, a module for each kind of thing."""

from __future__ import annotations

from jobs_lib.declaring.jobs import JobDeclarations
from jobs_lib.declaring.topics import TopicDeclarations

__all__ = ["JobDeclarations", "TopicDeclarations"]
