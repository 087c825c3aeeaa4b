"""Altering and dropping columns: what computed columns forbid, and how they follow it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from geneva.errors import UserInputError
from geneva.model.computation import RECEIPT_PREFIX, receipt_name
from geneva.model.sql import quoted_name
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.storage.columns.definitions import (
    commit_pinned,
    known_paths,
    not_defined,
    read_definition,
    read_definitions,
)
from geneva.storage.lance.dataset import FieldsNow, open_dataset, refuse_names_of_lance
from geneva.storage.views.definition import (
    is_view,
    present_definitions,
    reads_source,
    visible_schema,
)
from geneva.udf.paths import steps_to


def refuse_hidden(ref: TableRef, schema: pa.Schema, paths: Iterable[str]) -> None:
    """Refuse to change a column of Geneva's own, or to give a column such a name."""
    visible = visible_schema(schema).names
    for path in paths:
        name = top_name(path)
        if name.startswith(RECEIPT_PREFIX) or (name in schema.names and name not in visible):
            raise UserInputError(
                f"Column {name!r} of {'view' if is_view(schema) else 'table'} {ref.name!r} is "
                "Geneva's own: it can't be computed, renamed, altered or dropped by itself."
            )


def refuse_altering_hidden(ref: TableRef, alterations: Sequence[Mapping[str, Any]]) -> None:
    """The same for what `alter_columns` is given: columns, and names that they are to get."""
    paths = [str(a["path"]) for a in alterations if a.get("path") is not None]
    refuse_hidden(ref, open_dataset(ref).schema, [*paths, *_new_names(alterations)])


def _new_names(alterations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that columns are to get; LanceDB has two words for that."""
    keys = ("rename", "name")
    return [str(a[key]) for a in alterations for key in keys if a.get(key) is not None]


def check_alterable(ref: TableRef, alterations: Sequence[Mapping[str, Any]]) -> None:
    """Refuse another type for a computed column, and names that are Lance's own.

    Lance would make a plain column of a computed one, and so would a field of a struct.
    """
    schema = open_dataset(ref).schema if alterations else pa.schema([])
    refuse_names_of_lance(_new_names(alterations))
    for alteration in alterations:
        path = str(alteration.get("path", ""))
        name = top_name(path)
        if not is_computed(schema, name):
            continue
        if alteration.get("data_type") is not None or _is_nested(path, name):
            raise _type_is_the_udfs(ref, name)


def alter_plain_columns(
    ref: TableRef, alterations: Sequence[Mapping[str, Any]], alter: Callable[[], Any]
) -> Any:
    """Let LanceDB alter columns, and the computed ones follow what they are made from."""
    before = open_dataset(ref)
    renamed = {_unquoted(str(a["path"])): name for a in alterations for name in _new_names([a])}
    inputs = {
        d.uuid: tuple(_path_after(before.schema, path, renamed) for path in d.inputs)
        for d in present_definitions(before).values()
        if not reads_source(d.arrow_field) and d.doubt is None
    }
    altered = alter()

    def paths_after(definition: ColumnDefinition, fields: FieldsNow) -> tuple[str, ...] | None:
        paths = inputs.get(definition.uuid)
        is_unsure = paths == definition.inputs and known_paths(definition, fields) is None
        return None if is_unsure else paths

    if inputs:
        commit_pinned(ref, paths_after)
    return altered


def _unquoted(path: str) -> str:
    """A path whose names may be quoted, as in SQL, with plain names."""
    parts = re.findall(r"`((?:[^`]|``)+)`|([^.`]+)", path)
    return ".".join(quoted.replace("``", "`") or name for quoted, name in parts)


def _path_after(schema: pa.Schema, path: str, renamed: Mapping[str, str]) -> str:
    """Where a path leads when columns, or fields of structs, have got other names."""
    steps = steps_to(schema, path) or (path,)
    wholes = (".".join(steps[: i + 1]) for i in range(len(steps)))
    return ".".join(renamed.get(whole, step) for whole, step in zip(wholes, steps, strict=True))


def is_computed(schema: pa.Schema, name: str) -> bool:
    """Whether there is a computed column of that name."""
    return name in schema.names and read_definition(schema, name) is not None


def top_name(path: str) -> str:
    """The column that a path leads into; names may be quoted, as in SQL."""
    quoted = re.match(r"`((?:[^`]|``)+)`", path)
    return path.partition(".")[0] if quoted is None else quoted[1].replace("``", "`")


def _is_nested(path: str, name: str) -> bool:
    return path not in (name, quoted_name(name))


def _type_is_the_udfs(ref: TableRef, name: str) -> UserInputError:
    return UserInputError(
        f"Column {name!r} of table {ref.name!r} is computed: its type is its UDF's. To give it "
        "another one, drop it, and add it again with a UDF of that type."
    )


def check_droppable(ref: TableRef, names: Sequence[str]) -> None:
    """Refuse to drop a column that a computed one still reads, under whatever name it has now."""
    dataset = open_dataset(ref)
    schema = dataset.schema
    refuse_hidden(ref, schema, names)
    missing = [name for name in names if name.split(".")[0] not in schema.names]
    if missing:
        raise not_defined(schema, ref.name, missing[0])
    for name in names:
        if _is_nested(name, top_name(name)) and is_computed(schema, top_name(name)):
            raise _type_is_the_udfs(ref, top_name(name))
    for definition in present_definitions(dataset).values():
        if definition.name in names:
            continue
        needed = [name for name in names if _reads(definition, name)]
        if needed:
            raise UserInputError(
                f"Column {needed[0]!r} can't be dropped: computed column {definition.name!r} "
                f"{'reads' if definition.doubt is None else 'may read'} it. Drop "
                f"{definition.name!r} first (or in the same call), or give it another UDF."
            )


def receipts_of(ref: TableRef, names: Sequence[str]) -> list[str]:
    """The columns of receipts that go with columns that are dropped, and those left over."""
    schema = open_dataset(ref).schema
    kept = {
        receipt_name(definition.uuid)
        for definition in read_definitions(schema).values()
        if definition.name not in names
    }
    return [n for n in schema.names if n.startswith(RECEIPT_PREFIX) and n not in kept]


def _reads(definition: ColumnDefinition, name: str) -> bool:
    """Whether a computed column reads a column, or may: nobody knows which of some it reads."""
    unsure = () if definition.doubt is None else definition.doubt.candidates
    paths = (*definition.inputs, *unsure)
    return any(path == name or path.startswith(f"{name}.") for path in paths)
