"""Places of rows (`ctid`) as a parameter: psycopg has nothing for them."""

from __future__ import annotations

import struct

from psycopg.adapt import Dumper
from psycopg.postgres import types
from psycopg.pq import Format

_TID_LENGTH = struct.pack("!i", 6)


class TidArray(list[bytes]):
    """Places of rows (`ctid`), each as it was read in binary form."""


class TidArrayDumper(Dumper):
    """Sends them as a binary `tid[]`, for which psycopg has nothing."""

    oid = types["tid"].array_oid
    format = Format.BINARY

    def dump(self, obj: TidArray) -> bytes:
        # One dimension, no nulls, from 1 on; then each place behind its length.
        head = struct.pack("!iiIii", 1, 0, types["tid"].oid, len(obj), 1)
        return _TID_LENGTH.join([head, *obj])
