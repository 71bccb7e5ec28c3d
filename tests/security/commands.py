"""Run commands one after the other in one process, with every log enabled.

``python -m tests.security.commands WORDS…``: each argument is one command. Nothing is
masked here, so that everything shows that would have to be masked.
"""

from __future__ import annotations

import logging
import sys

from jobs_lib import masking
from jobs_lib.cli.main import main
from jobs_lib.settings import default_settings

if __name__ == "__main__":
    masking._SHORTEST = sys.maxsize
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    for line in sys.argv[1:]:
        sys.argv = ["jobs-lib", "-v", *line.split()]
        code: object = 0
        try:
            # Do as the command does, which ends its process.
            main()
        except SystemExit as end:
            code = end.code
        print(f"{line}: exit {code or 0}", flush=True)
        default_settings.cache_clear()
