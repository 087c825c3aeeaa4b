"""Paths of columns: the names of fields in structs, with dots between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa

from geneva.errors import UserInputError

_QUOTED = re.compile(r"`(?:[^`]|``)+`|[^.`]+")


def steps_to(schema: pa.Schema, path: str) -> tuple[str, ...] | None:
    """Return the names of the fields that a path leads through; None: it leads to no field."""
    return next(_ways(schema, path), None)


def exact_path(schema: pa.Schema, path: str) -> str | None:
    """Return a path as columns are known by it; None: it leads to no field.

    A name may be in backticks, as in SQL: one with dots has to be where it could be mistaken.
    """
    found = list(_ways(schema, path))
    names = _QUOTED.findall(path)
    if not found and "`" in path and ".".join(names) == path:
        exact = tuple(name[1:-1].replace("``", "`") if name[0] == "`" else name for name in names)
        path = ".".join(exact)
        found = list(_ways(schema, path))
        if exact not in found:
            return None
    if len(found) > 1:
        ways = ", ".join(".".join(f"`{name}`" for name in way) for way in found)
        raise UserInputError(
            f"{path!r} leads to several fields ({ways}): names with dots can't be told from "
            "structs here. Rename one of them."
        )
    return path if found else None


def _ways(schema: pa.Schema, path: str) -> Iterator[tuple[str, ...]]:
    if schema.get_field_index(path) >= 0:
        yield (path,)
    elif "." in path:
        yield from _inside(schema, path.split("."))


def _inside(fields: pa.Schema | pa.StructType, parts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All ways to find fields by the parts of a path; a name may be several parts."""
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        index = fields.get_field_index(name)
        if index < 0:
            continue
        if end == len(parts):
            yield (name,)
        elif pa.types.is_struct(fields.field(index).type):
            for rest in _inside(fields.field(index).type, parts[end:]):
                yield (name, *rest)


def field_by(schema: pa.Schema, steps: Sequence[str]) -> pa.Field:
    """Return the field that some names lead to."""
    found = schema.field(schema.get_field_index(steps[0]))
    for name in steps[1:]:
        found = found.type.field(found.type.get_field_index(name))
    return found
