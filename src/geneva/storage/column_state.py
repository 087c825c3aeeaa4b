"""Which values of a computed column are right, as the committed table itself tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lance

from geneva.model import ColumnDefinition, Reason, TableRef
from geneva.rows import RowSet
from geneva.storage.dataset import FragmentFacts, TableSnapshot, quote_path, read_matching_rows
from geneva.storage.provenance import (
    Provenance,
    input_signature,
    named,
    parse_file_name,
    read_provenance,
)


@dataclass(frozen=True, slots=True)
class Committed:
    """The committed values of one column in one fragment."""

    valid: RowSet
    reason: Reason
    """Why the rows that are not valid aren't."""
    output_file: str | None
    """The file the values are in; None when the fragment has none."""
    inputs: tuple[str, ...]
    """Input signature of the fragment."""


def input_field_ids(
    snapshot: TableSnapshot, definition: ColumnDefinition
) -> dict[str, tuple[int, ...]]:
    """The field ids behind each input of a column."""
    return {path: snapshot.field_ids[path] for path in definition.inputs}


def read_committed(
    dataset: lance.LanceDataset, snapshot: TableSnapshot, definition: ColumnDefinition
) -> dict[int, Committed]:
    """What is valid in each fragment. Files that Geneva wrote answer by their names alone."""
    inputs = input_field_ids(snapshot, definition)
    output = snapshot.field_ids[definition.name]
    states: dict[int, Committed] = {}
    unknown: list[tuple[FragmentFacts, str, tuple[str, ...]]] = []
    for fragment in snapshot.fragments:
        signature = input_signature(fragment, inputs)
        files = fragment.files_of(output)
        if not files:
            nothing = RowSet.empty(fragment.physical_rows)
            states[fragment.id] = Committed(nothing, Reason.NEW, None, signature)
            continue
        path = "\n".join(file.path for file in files)
        valid = _by_name(snapshot.ref, definition, fragment, path, signature)
        if valid is None:
            unknown.append((fragment, path, signature))
        else:
            states[fragment.id] = Committed(valid[0], valid[1], path, signature)
    if unknown:
        present = _rows_with_value(dataset, [f for f, _, _ in unknown], definition.name)
        for fragment, path, signature in unknown:
            states[fragment.id] = Committed(present[fragment.id], Reason.NULL, path, signature)
    return states


def _by_name(
    ref: TableRef,
    definition: ColumnDefinition,
    fragment: FragmentFacts,
    path: str,
    signature: tuple[str, ...],
) -> tuple[RowSet, Reason] | None:
    """What a file's name says of its rows; None when the file was not written by Geneva."""
    found = parse_file_name(path)
    if found is None:
        return None
    nothing = RowSet.empty(fragment.physical_rows)
    wanted = named(Provenance(definition.uuid, definition.udf_version, signature, nothing))
    if (found.column, found.udf) != (wanted.column, wanted.udf):
        return nothing, Reason.UDF_CHANGED
    if found.inputs != wanted.inputs:
        return nothing, Reason.INPUT_CHANGED
    if found.complete:
        return RowSet.full(fragment.physical_rows), Reason.UP_TO_DATE
    provenance = read_provenance(ref, path)
    return (provenance.valid if provenance is not None else nothing), Reason.PARTIAL


def _rows_with_value(
    dataset: lance.LanceDataset, fragments: Sequence[FragmentFacts], column: str
) -> dict[int, RowSet]:
    """The rows that have a value, whoever supplied it: there is nothing else to go by."""
    return read_matching_rows(
        dataset, fragments, f"{quote_path(column, dataset.schema)} IS NOT NULL"
    )
