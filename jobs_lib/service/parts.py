"""The parts of a service, and what each needs to have something to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs_lib.app import App

PARTS = ("consumers", "executor", "relay")
_NEEDS = {
    "consumers": "consumer or read model (`@app.consumer`, `@app.read_model`)",
    "executor": "job type (`@app.job`)",
    "relay": "topic (`app.topic`)",
}


def check_parts(app: App, parts: Collection[str]) -> None:
    """Refuse a service that would run, and have nothing to do.

    Args:
        app: what is to be run.
        parts: of the service.

    Raises:
        ConfigurationError: none of the parts has anything to do, or there is no such
            part, or the settings have workers that no job type has.
    """
    if unknown := sorted({*parts} - {*PARTS}):
        raise ConfigurationError(
            f"a service has no {', '.join(unknown)}: its parts are {', '.join(PARTS)}"
        )
    named = {job.workers.name for job in app.jobs.values() if job.workers}
    if unknown := sorted(app.settings.own_workers.keys() - named):
        raise ConfigurationError(
            f"JOBS_LIB_OWN_WORKERS names {', '.join(unknown)}, and no job type has "
            f"such workers: there are {', '.join(sorted(named)) or 'none'}"
        )
    declared = {"consumers": app.consumers, "executor": app.jobs, "relay": app.topics}
    if any(declared[part] for part in parts):
        return
    asked = [part for part in PARTS if part in parts]
    lacking = " and no ".join(_NEEDS[part] for part in asked)
    raise ConfigurationError(
        f"the app {app.name!r} declares no {lacking or 'part to run'}, so there is "
        f"nothing to do for {' and '.join(asked) or 'a service'}. Is it the right "
        "MODULE:APP, and does its module import those in which things are declared?"
    )
