"""Compare the schemas that an app declares with the registry, and register them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError
from jobs_lib.schemas.avro import AvroEncoder, parse_schema
from jobs_lib.schemas.compatibility import list_misfits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from jobs_lib.app import App
    from jobs_lib.schemas.avro import AvroSchema
    from jobs_lib.schemas.compatibility import Misfit

FULL = "FULL_TRANSITIVE"
FORWARD = "FORWARD_TRANSITIVE"
LEVELS = (FULL, FORWARD)
"""The levels at which every consumer can go on reading: see docs/schemas.md."""
_WAY_OUT = "or publish to a new topic, and to both until all have moved"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about one subject that matters for the deployment."""

    subject: str
    version: int | None
    """The earlier version that the schema does not fit."""
    field: str
    """Such as ``crew[].name``; empty if it is about the whole schema."""
    problem: str
    fails: bool = True
    """Whether the schema must not be registered like this."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A subject before the deployment."""

    name: str
    schema: AvroSchema
    versions: Mapping[int, AvroSchema]
    level: str | None
    """The level that is set; None if none is set, or none that suffices."""
    own: str | None
    """The level that is set for this subject alone."""


def check_schemas(app: App) -> list[Finding]:
    """Compare each declared schema with every registered version; changes nothing.

    A schema fits if it can read the records of all versions, and all versions can read
    its records. If the registry is set to FORWARD_TRANSITIVE, the latter suffices.

    Raises:
        ConfigurationError: no registry is set, or it refuses to answer.
        UnavailableError: the registry does not answer.
    """
    return [finding for one in _read_subjects(app) for finding in _check(one)]


def check_against(app: App, folder: Path, level: str = FULL) -> list[Finding]:
    """Do as :func:`check_schemas`, with the versions in files and without a registry.

    Args:
        app: declares the schemas.
        folder: holds ``<subject>/<version>.avsc``.
        level: FULL_TRANSITIVE or FORWARD_TRANSITIVE.

    Raises:
        ConfigurationError: a file is no schema, or the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"there is no folder {folder}: it should hold the released schemas as "
            "<subject>/<version>.avsc"
        )
    return [
        finding
        for encoder in _encoders(app)
        for finding in _check(
            _Subject(
                encoder.subject,
                encoder.schema,
                _read_folder(folder / encoder.subject),
                level,
                level,
            )
        )
    ]


def register_schemas(app: App) -> tuple[list[Finding], dict[str, int]]:
    """Register the declared schemas, if all fit; a step of each deployment.

    A subject without a sufficient level gets FULL_TRANSITIVE, so that the registry
    holds all other clients to it, too. Calling it again changes nothing.

    Returns what the check found, and the ids by subject: none if any finding fails.

    Raises:
        ConfigurationError: no registry is set, or it refuses a schema.
        UnavailableError: the registry does not answer.
    """
    subjects = list(_read_subjects(app))
    findings = [finding for one in subjects for finding in _check(one)]
    if any(finding.fails for finding in findings):
        return findings, {}
    ids = {}
    for one in subjects:
        registry = app.registry()
        # Some registries have no settings for a subject without a version.
        if one.versions and one.level is None:
            registry.set_level(one.name, FULL)
        ids[one.name] = registry.register(one.name, one.schema)
        if not one.versions and one.level is None:
            registry.set_level(one.name, FULL)
    return findings, ids


def _encoders(app: App) -> Iterator[AvroEncoder]:
    for topic in app.written:
        if isinstance(topic.encoder, AvroEncoder):
            yield topic.encoder


def _read_subjects(app: App) -> Iterator[_Subject]:
    for encoder in _encoders(app):
        registry = app.registry()
        own = registry.read_level(encoder.subject)
        level = own or registry.read_level(None)
        try:
            versions = registry.read_versions(encoder.subject)
        except ValueError as error:
            raise ConfigurationError(
                f"the versions of {encoder.subject!r} cannot be compared: {error}"
            ) from None
        yield _Subject(
            encoder.subject,
            encoder.schema,
            versions,
            level if level in LEVELS else None,
            own,
        )


def _read_folder(folder: Path) -> dict[int, AvroSchema]:
    versions = {}
    for file in folder.glob("*.avsc"):
        try:
            if not re.fullmatch("[1-9][0-9]*", file.stem):
                raise ValueError("its name is no version, such as 1.avsc")
            schema = parse_schema(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{file} is not usable: {error}") from None
        versions[int(file.stem)] = schema
    return dict(sorted(versions.items()))


def _check(subject: _Subject) -> Iterator[Finding]:
    if subject.own is not None and subject.own not in LEVELS:
        yield Finding(
            subject.name,
            None,
            "",
            f"the subject is set to {subject.own}, which does not look at every "
            f"version: set it to {FULL}",
        )
    if subject.level == FORWARD:
        yield Finding(
            subject.name,
            None,
            "",
            f"the subject is set to {FORWARD}: older records may not fit the new "
            "schema, so run a full re-export after each upgrade",
            fails=False,
        )
    for version, schema in subject.versions.items():
        for misfit in list_misfits(schema, subject.schema):
            yield _find(subject, version, misfit, _stays_behind(version))
        if subject.level != FORWARD:
            for misfit in list_misfits(subject.schema, schema):
                yield _find(subject, version, misfit, _goes_back(version))


def _find(subject: _Subject, version: int, misfit: Misfit, consequence: str) -> Finding:
    return Finding(
        subject.name, version, misfit.path, f"{misfit.reason}: {consequence}"
    )


def _stays_behind(version: int) -> str:
    return (
        f"consumers of version {version} cannot read new records. Leave the field as "
        f"it was, {_WAY_OUT}"
    )


def _goes_back(version: int) -> str:
    return (
        f"records of version {version} cannot be read any more. Give it a default, "
        f"{_WAY_OUT}"
    )
