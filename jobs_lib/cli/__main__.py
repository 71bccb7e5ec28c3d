"""``python -m jobs_lib.cli``: the same as the command ``jobs-lib``."""

from __future__ import annotations

from jobs_lib.cli.main import main

if __name__ == "__main__":
    main()
