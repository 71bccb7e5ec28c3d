"""Keys that follow from what is unique of an entity."""

from __future__ import annotations

import json
from uuid import UUID, uuid5

from jobs_lib.errors import PayloadError

_NAMESPACE = UUID("9d3ab3a1-5a0e-4f0c-8c1b-2f6f0d6a7c55")
"""Never to be changed: all keys follow from it."""


def derive_key(*parts: str) -> str:
    """Derive the key of an entity from what is unique of it, such as an email.

    Equal parts give the same key, in every process and release, so two requests that
    create an entity with them mean one entity. It is a UUID of version 5. Bring the
    parts into one form before, such as lower case.

    Raises:
        PayloadError: there is no part, or a part is no text or is empty.
    """
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise PayloadError(
            "a key is derived from texts that are not empty, such as an email: check "
            "that the unique fields are set"
        )
    return str(uuid5(_NAMESPACE, json.dumps(parts)))
