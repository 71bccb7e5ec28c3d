"""Places of rows (`ctid`) as a parameter: psycopg has no dumper for them."""

from __future__ import annotations

import struct

from psycopg.adapt import Dumper
from psycopg.postgres import types
from psycopg.pq import Format

_TID_LENGTH = struct.pack("!i", 6)


class TidArray(list[bytes]):
    """Places of rows (`ctid`), each in the binary form in which it was read."""


class TidArrayDumper(Dumper):
    """Sends a `TidArray` as a binary `tid[]`."""

    oid = types["tid"].array_oid
    format = Format.BINARY

    def dump(self, obj: TidArray) -> bytes:
        # One dimension, no nulls, indexes from 1; then each place after its length.
        head = struct.pack("!iiIii", 1, 0, types["tid"].oid, len(obj), 1)
        return _TID_LENGTH.join([head, *obj])
