"""Small ASGI apps to mount in a web app of your own; none is served unless mounted.

They need the extra ``web``: ``pip install 'jobs-lib[web]'``.
"""

from __future__ import annotations

from jobs_lib.errors import ConfigurationError
from jobs_lib.extras import require_driver

try:
    import starlette
except ImportError:
    raise ConfigurationError(
        "the web apps need Starlette: pip install 'jobs-lib[web]'"
    ) from None
else:
    require_driver()
    del starlette

from jobs_lib.web.reexports import reexports

__all__ = ["reexports"]
