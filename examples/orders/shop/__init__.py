"""The shop: takes orders over HTTP, charges for them, and publishes their state."""

from __future__ import annotations
