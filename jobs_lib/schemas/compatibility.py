"""Whether values written with one schema can be read with another: Avro's resolution.

Two changes that the specification allows are refused here. If a logical type turns into
another one, numbers would change their meaning, such as cents to euros. And not all
bytes are UTF-8, so bytes cannot be read as a string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.schemas.avro import AvroSchema

_PRIMITIVE = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_NAMED = {"record", "enum", "fixed"}
_PROMOTED = {
    "long": {"int"},
    "float": {"int", "long"},
    "double": {"int", "long", "float"},
    "bytes": {"string"},
}
"""The other types that each type can read."""


class Misfit(NamedTuple):
    """A reason why values cannot be read."""

    path: str
    """The field, such as ``crew[].name``; empty for the value itself."""
    reason: str


def list_misfits(reader: AvroSchema, writer: AvroSchema) -> list[Misfit]:
    """List what keeps ``reader`` from reading values of ``writer``; empty if nothing.

    If several reasons are about the same field, all are listed.
    """
    return _Comparison(reader.named, writer.named).compare(
        reader.parsed, writer.parsed, ""
    )


class _Comparison:
    def __init__(self, readers: Mapping[str, Any], writers: Mapping[str, Any]) -> None:
        self._readers = readers
        self._writers = writers
        self._compared: set[tuple[str, str]] = set()
        """Records by name: a record that contains itself is compared once."""

    def compare(self, reader: Any, writer: Any, path: str) -> list[Misfit]:
        reader = self._readers.get(reader, reader) if _is_name(reader) else reader
        writer = self._writers.get(writer, writer) if _is_name(writer) else writer
        if isinstance(writer, list):
            found = [self.compare(reader, branch, path) for branch in writer]
            return [misfit for misfits in found for misfit in misfits]
        if isinstance(reader, list):
            return self._compare_branches(reader, writer, path)
        kind, written = _type_of(reader), _type_of(writer)
        if kind != written and written not in _PROMOTED.get(kind, ()):
            return [Misfit(path, f"{written} cannot be read as {kind}")]
        meant, was = _meaning(reader), _meaning(writer)
        if meant and was and meant != was:
            return [Misfit(path, f"{was} would be taken for {meant}")]
        if kind in _NAMED and (wrong := _compare_named(kind, reader, writer)):
            return [Misfit(path, wrong)]
        if kind == "record":
            return self._compare_fields(reader, writer, path)
        if kind == "array":
            return self.compare(reader["items"], writer["items"], f"{path}[]")
        if kind == "map":
            return self.compare(reader["values"], writer["values"], f"{path}{{}}")
        return []

    def _compare_branches(
        self, branches: list[Any], writer: Any, path: str
    ) -> list[Misfit]:
        """Find a branch of a union that fits; else list what the nearest one lacks."""
        nearest = None
        compared = self._compared
        for branch in branches:
            # Records compared in a branch that fails are compared again in the next.
            self._compared = set(compared)
            misfits = self.compare(branch, writer, path)
            if not misfits:
                return []
            named = self._readers.get(branch, branch) if _is_name(branch) else branch
            if _type_of(named) == _type_of(writer) and _same_name(named, writer):
                nearest = misfits
        self._compared = compared
        return nearest or [Misfit(path, f"{_type_of(writer)} is in no branch of it")]

    def _compare_fields(self, reader: Any, writer: Any, path: str) -> list[Misfit]:
        pair = (reader["name"], writer["name"])
        if pair in self._compared:
            return []
        self._compared.add(pair)
        written = {field["name"]: field for field in writer["fields"]}
        misfits = []
        for field in reader["fields"]:
            place = f"{path}.{field['name']}" if path else field["name"]
            names = [field["name"], *field.get("aliases", ())]
            source = next((written[name] for name in names if name in written), None)
            if source is not None:
                misfits += self.compare(field["type"], source["type"], place)
            elif "default" not in field:
                misfits.append(Misfit(place, "it is missing, and has no default"))
        return misfits


def _compare_named(kind: str, reader: Any, writer: Any) -> str:
    """Say what is wrong with a named type, apart from a record's fields."""
    if not _same_name(reader, writer):
        return f"the {kind} {writer['name']} is not {reader['name']}, nor an alias"
    if kind == "fixed" and reader["size"] != writer["size"]:
        return f"{writer['size']} bytes cannot be read as {reader['size']}"
    if kind == "enum" and "default" not in reader:
        missing = [s for s in writer["symbols"] if s not in reader["symbols"]]
        if missing:
            symbols = ", ".join(missing)
            return f"the enum {reader['name']} has no default for {symbols}"
    return ""


def _is_name(schema: Any) -> bool:
    return isinstance(schema, str) and schema not in _PRIMITIVE


def _type_of(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    return schema if isinstance(schema, str) else str(schema["type"])


def _same_name(reader: Any, writer: Any) -> bool:
    """Whether names agree without namespaces, or by an alias; unnamed types do."""
    if _type_of(reader) not in _NAMED:
        return True
    if reader["name"].rpartition(".")[2] == writer["name"].rpartition(".")[2]:
        return True
    space = reader["name"].rpartition(".")[0]
    aliases = reader.get("aliases", ())
    return any(
        (one if "." in one or not space else f"{space}.{one}") == writer["name"]
        for one in aliases
    )


def _meaning(schema: Any) -> str:
    """The logical type, with all that changes a value's meaning."""
    if isinstance(schema, str) or "logicalType" not in schema:
        return ""
    name = str(schema["logicalType"])
    return f"{name} of scale {schema.get('scale', 0)}" if name == "decimal" else name
