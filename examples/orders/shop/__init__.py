"""The shop: it takes orders over HTTP, charges for them, and sends their state."""

from __future__ import annotations
