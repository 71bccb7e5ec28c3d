"""An operator's work: list, explain, cancel, pause, retry and maintain.

Each name is imported at its first use: the commands about coordination logs work where
no database driver can be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.lazy import import_name

if TYPE_CHECKING:
    from jobs_lib.operating.cancellation import cancel
    from jobs_lib.operating.checks import Finding, Limits, check
    from jobs_lib.operating.discarded import delete_discarded
    from jobs_lib.operating.explanation import Explanation, Reason, explain
    from jobs_lib.operating.grants import apply_grants, list_grants
    from jobs_lib.operating.history import Maintained, maintain
    from jobs_lib.operating.listing import Filter, Listed, Shown, list_jobs, show_job
    from jobs_lib.operating.outbox import (
        Held,
        Waiting,
        drop_row,
        list_holds,
        list_waiting,
        retry_holds,
        show_row,
    )
    from jobs_lib.operating.owners import Owned, list_owners
    from jobs_lib.operating.pauses import Change, Pause, list_pauses, pause, resume
    from jobs_lib.operating.retries import Retried, retry

__all__ = [
    "Change",
    "Explanation",
    "Filter",
    "Finding",
    "Held",
    "Limits",
    "Listed",
    "Maintained",
    "Owned",
    "Pause",
    "Reason",
    "Retried",
    "Shown",
    "Waiting",
    "apply_grants",
    "cancel",
    "check",
    "delete_discarded",
    "drop_row",
    "explain",
    "list_grants",
    "list_holds",
    "list_jobs",
    "list_owners",
    "list_pauses",
    "list_waiting",
    "maintain",
    "pause",
    "resume",
    "retry",
    "retry_holds",
    "show_job",
    "show_row",
]

_MODULES = {
    "Change": "pauses",
    "Explanation": "explanation",
    "Filter": "listing",
    "Finding": "checks",
    "Held": "outbox",
    "Limits": "checks",
    "Listed": "listing",
    "Maintained": "history",
    "Owned": "owners",
    "Pause": "pauses",
    "Reason": "explanation",
    "Retried": "retries",
    "Shown": "listing",
    "Waiting": "outbox",
    "apply_grants": "grants",
    "cancel": "cancellation",
    "check": "checks",
    "delete_discarded": "discarded",
    "drop_row": "outbox",
    "explain": "explanation",
    "list_grants": "grants",
    "list_holds": "outbox",
    "list_jobs": "listing",
    "list_owners": "owners",
    "list_pauses": "pauses",
    "list_waiting": "outbox",
    "maintain": "history",
    "pause": "pauses",
    "resume": "pauses",
    "retry": "retries",
    "retry_holds": "outbox",
    "show_job": "listing",
    "show_row": "outbox",
}


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULES, name)
