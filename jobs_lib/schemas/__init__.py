"""How values become a record's bytes and back: JSON, plain bytes, or Avro."""

from __future__ import annotations
