"""The secrets that this process was given, and texts without them.

No text of ours is made from a secret. What others write is not ours to vouch for, such
as the error of a handler or of a driver: so every text that the library puts into a
log, a column or a terminal goes through :func:`mask`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MASK = "***"
_SHORTEST = 4
"""Characters; hiding fewer would make texts unreadable and nothing safe."""
_ANYWHERE = 8
"""Characters from which on a secret is hidden inside a longer word, too."""
_SECRET = re.compile(
    r"password|secret|jaas|ssl[._]key|oauthbearer\.config|user\.info|auth\.token"
)
"""In the names of settings of Kafka's and the registry's client with secret values."""
_secrets: set[str] = set()
_pattern: re.Pattern[str] | None = None


def keep_secret(words: Iterable[str]) -> None:
    """Show these in no text from now on, in this process."""
    global _pattern
    new = {word for word in words if len(word) >= _SHORTEST} - _secrets
    if not new:
        return
    _secrets.update(new)
    # The longest first: one may be a part of another.
    ordered = sorted(_secrets, key=len, reverse=True)
    _pattern = re.compile("|".join(map(_alone, ordered)))


def mask(text: str) -> str:
    """The text, with ``***`` in the place of each secret."""
    return text if _pattern is None else _pattern.sub(_MASK, text)


def describe(error: BaseException) -> str:
    """What is kept of an error: its type and its text, masked."""
    return mask(f"{type(error).__name__}: {error}")


def find_secrets(settings: Mapping[str, str]) -> set[str]:
    """The secret values among settings of Kafka's client, or the registry's."""
    found: set[str] = set()
    for key, value in settings.items():
        if _SECRET.search(key) and not key.endswith((".location", ".type")):
            # Of a key in PEM each line, but the first and the last.
            lines = {line for line in value.splitlines() if line[:5] != "-----"}
            found |= {value, *lines}
            if key.endswith("user.info"):  # as user:password
                found.add(value.partition(":")[2])
    return found


def find_passwords(url: str) -> set[str]:
    """The passwords in a URL, as they stand there and as the server is given them."""
    _, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    credentials = authority.rpartition("@")[0]
    user, _, raw = credentials.partition(":")
    found = {raw, unquote(raw)}
    query = f"{authority}/{path}".rpartition("@")[2].partition("?")[2]
    for parameter in query.split("&"):
        name, _, value = parameter.partition("=")
        if name in {"password", "sslpassword"}:
            found |= {value, unquote(value)}
    # What stands elsewhere, too, is no secret, and hidden it would only puzzle.
    return found - {"", unquote(user), path.partition("?")[0]}


def masked_url(url: str) -> str:
    """The URL without its password and query, fit for a message."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        # libpq's other form, `host=… password=…`.
        return "a connection string"
    # By hand: `urlsplit` refuses several hosts and what people forget to escape.
    authority, slash, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    user = re.split("[:?]", credentials, maxsplit=1)[0]
    return f"{scheme}://{user}{at}{hosts.split('?')[0]}{slash}{path.split('?')[0]}"


def _alone(word: str) -> str:
    escaped = re.escape(word)
    return escaped if len(word) >= _ANYWHERE else rf"(?<!\w){escaped}(?!\w)"
