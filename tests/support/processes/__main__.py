"""Start a process of a kind: `python -m tests.support.processes KIND URL OPTIONS`.

The options are JSON: those of the kind, settings of its app, and `dies_at`. With
`dies_at` the process kills itself at the nth event of a name.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import NoReturn

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.processes import (
    dying,
    executors,
    gated,
    places,
    pods,
    processors,
    publishers,
    relays,
)
from tests.support.processes.kinds import KINDS, die_at

#: The modules that have the kinds.
MODULES = (dying, executors, gated, places, pods, processors, publishers, relays)


def main() -> NoReturn:
    """Run until a signal stops the process."""
    name, url, given = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    kind, options = KINDS[name], json.loads(given)
    die_at(options.pop("dies_at", {}))
    own = {one: options.pop(one) for one in kind.options & options.keys()}
    app = make_app(url, **{**kind.settings, **options})
    kind.declare(app, **own)
    sys.exit(Service(app, kind.parts, sidecar=kind.is_sidecar).run())


if __name__ == "__main__":
    main()
