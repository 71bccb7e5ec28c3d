"""The secrets that this process was given, and texts without them.

The library makes no text from a secret. Other code, such as a handler or a driver, may
put one into its errors. So every text that the library puts into a log, a column or a
terminal goes through :func:`mask`.
"""

from __future__ import annotations

import logging
import re
import traceback
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

from jobs_lib.reasons import explain_foreign, name_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

MASK = "***"
"""Stands where a secret stood."""
_SHORTEST = 4
"""Characters; hiding fewer would make texts unreadable and nothing safe."""
_ANYWHERE = 8
"""Secrets of at least this length are also hidden inside longer words."""
_LONGEST = 2_000
"""How many characters of a text from other code are kept."""
_LOOKED_AT = 20_000
"""Characters of it in which secrets are looked for: it may be of any size."""
_MOST_FRAMES = -50
"""How many characters of a traceback are kept, from its end."""
_OURS = "jobs_lib"
_SECRET = re.compile(
    r"password|passphrase|secret|jaas|ssl[._]key|private\.key|oauthbearer\.config"
    r"|user\.info|auth\.token"
)
"""In the names of settings of Kafka's and the registry's client with secret values."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_secrets: set[str] = set()
_pattern: re.Pattern[str] | None = None


def keep_secret(words: Iterable[str]) -> None:
    """Hide these in every text of this process from now on."""
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
    return text if _pattern is None else _pattern.sub(MASK, text)


def one_line(text: str) -> str:
    """The text with its control characters as escapes: it cannot forge a log line."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_lines(text: str) -> str:
    """The lines of a traceback, indented, so that none looks like a log record."""
    return "\n".join(f"    {one_line(line)}" for line in mask(text).split("\n"))


class PlainRecords(logging.Filter):
    """Makes each record one line without secrets, for any formatter."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        record.msg, record.args = one_line(mask(record.getMessage())), None
        if told := getattr(record, "trace", None):
            record.exc_text = plain_lines(told)
        if record.exc_info and not record.exc_text:
            record.exc_text = plain_lines(trace(record.exc_info[1]))
        return True


def trace(error: BaseException | None, *, theirs: bool = False) -> str:
    """The traceback of an error, masked and without values; never raises.

    Args:
        error: what was raised.
        theirs: leave out the frames of this library that come first.
    """
    if error is None:
        return ""
    try:
        place = error.__traceback__
        if theirs:
            place = _find_theirs(place)
        told = "".join(
            traceback.format_exception(type(error), error, place, _MOST_FRAMES)
        ).rstrip()
        for one in find_errors(error):
            if (plain := explain_foreign(one)) is not None:
                # In a group of errors each line begins with a bar.
                lines = map(re.escape, str(one).split("\n"))
                plain = plain.replace("\\", r"\\")
                told = re.sub(r"\n[ |]*".join(lines), plain, told)
    except BaseException:  # any code may run behind an error's attributes
        return describe(error)
    return mask(_printable(told))


def _find_theirs(place: TracebackType | None) -> TracebackType | None:
    """Where the code of others begins; the whole where none of it is theirs."""
    frame = place
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] != _OURS:
            return frame
        frame = frame.tb_next
    return place


def describe(error: object) -> str:
    """An error's type and the start of its text; never raises."""
    return f"{name_class(error)}: {spell(error)}"[:_LONGEST]


def spell(value: object) -> str:
    """The start of a value's text, masked, fit for a log and a column; never raises.

    Of an error of pydantic or the server it is what :mod:`jobs_lib.reasons` says of it.

    The code that makes an error's text is the application's, and may fail itself.
    """
    try:
        # Not by isinstance, which asks the value.
        is_error = issubclass(type(value), BaseException)
        told = explain_foreign(cast("BaseException", value)) if is_error else None
        # Not by the text's own methods: a subclass of str has what its author likes.
        text = str.__getitem__(str(value) if told is None else told, slice(_LOOKED_AT))
    except BaseException as failure:
        return f"(its text cannot be made: {name_class(failure)})"
    whole = len(text) < _LOOKED_AT
    text = mask(_printable(text))
    # A secret that the cut went through is not recognized: it goes as a whole.
    longest = max(map(len, _secrets), default=0)
    return (text if whole else text[: max(0, len(text) - longest)])[:_LONGEST]


def _printable(text: str) -> str:
    """The text as a column can keep it."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def find_errors(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its causes, and those that it is a group of."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += one.__cause__, one.__context__, *getattr(one, "exceptions", ())


def find_secrets(settings: Mapping[str, str]) -> set[str]:
    """The secret values among settings of Kafka's client, or the registry's."""
    found: set[str] = set()
    for key, value in settings.items():
        if "://" in value:
            found |= find_passwords(value)
        if _SECRET.search(key) and not key.endswith((".location", ".file", ".type")):
            # Of a key in PEM each line, but the first and the last.
            lines = {line for line in value.splitlines() if line[:5] != "-----"}
            found |= {value, *lines}
            if key.endswith("user.info"):  # as user:password
                found.add(value.partition(":")[2])
    return found


def find_passwords(url: str) -> set[str]:
    """The passwords in a URL, as written there and as the server gets them."""
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
