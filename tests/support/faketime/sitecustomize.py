"""What a Python process needs under libfaketime: it is imported when one starts.

See `tests.support.clock.faketime_by`, which puts this folder on the path.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


# Python's own sleep ends at a time of the clock of elapsed time. libfaketime takes that
# for one of the wrong clock, and refuses it.
vars(time)["sleep"] = _sleep

# Kafka's client waits until a time of day. libfaketime does not translate that, so the
# wait would last as long as the clock is wrong. Loaded so, it has the clock of the
# machine. All else in the process has the wrong one.
_found = find_spec("confluent_kafka")
if _found is not None and _found.origin is not None:
    _folder = Path(_found.origin).parents[1] / "confluent_kafka.libs"
    for _library in _folder.glob("librdkafka*"):
        ctypes.CDLL(str(_library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
