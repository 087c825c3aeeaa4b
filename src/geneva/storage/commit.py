"""Publishing staged column files: the only place where a backfill changes the table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import lance
import pyarrow as pa
from lance import LanceOperation, Transaction
from lance.commit import CommitConflictError

from geneva.errors import ColumnChangedError, TableChangedError
from geneva.model import ColumnDefinition, TableRef
from geneva.storage.columns import read_definition
from geneva.storage.dataset import (
    FragmentFacts,
    TableSnapshot,
    open_dataset,
    output_field_ids,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.fragments import StagedFile, data_file
from geneva.storage.provenance import input_signature, parse_file_name, read_provenance
from geneva.storage.transactions import JOB_PROPERTY, PLANNED_PROPERTY, read_transaction

_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What became of a group of staged files."""

    version: int
    landed: tuple[StagedFile, ...]
    lost: tuple[tuple[StagedFile, str], ...]
    """Files that no longer fit the table, each with what happened to their fragment."""
    moved_on: bool
    """Whether somebody else committed in between."""


def commit_columns(
    ref: TableRef,
    dataset: lance.LanceDataset,
    definition: ColumnDefinition,
    staged: Sequence[StagedFile],
    job_id: str,
    max_retries: int,
) -> CommitOutcome:
    """Replace the column's files of several fragments in one commit.

    The planned version is the read version, so that Lance itself checks everything that happened
    since. Where it refuses, each file is checked against the latest version; those that still fit
    are committed on top of it, the others are handed back.
    """
    fitting, lost = list(staged), list[tuple[StagedFile, str]]()
    read_from, moved_on = dataset, False
    for attempt in range(max_retries + 1):
        if not fitting:
            return CommitOutcome(read_from.version, (), tuple(lost), moved_on)
        try:
            version = _commit(read_from, fitting, job_id, dataset.version)
            moved_on = moved_on or version > read_from.version + 1
            return CommitOutcome(version, tuple(fitting), tuple(lost), moved_on)
        except OSError as error:
            # lance.commit.CommitConflictError, or a plain OSError with the same text.
            if not is_conflict(error):
                landed = _landed_after_all(ref, dataset.version, fitting, job_id)
                if landed is None:
                    raise
                return CommitOutcome(landed, tuple(fitting), tuple(lost), moved_on=True)
        time.sleep(_RETRY_SECONDS * attempt)
        moved_on = True
        read_from = open_dataset(ref)
        snapshot = read_snapshot(read_from, ref)
        verified_definition(snapshot.schema, ref, definition)
        checked = [(file, _misfit(file, snapshot, read_from, definition)) for file in fitting]
        lost.extend((file, why) for file, why in checked if why is not None)
        fitting = [file for file, why in checked if why is None]
    raise TableChangedError(
        f"Could not commit column {definition.name!r} of table {ref.name!r} after {max_retries} "
        f"retries, because other writers kept getting in between. What was computed is kept: "
        f"run the backfill again. (GENEVA_VERSION_CONFLICT_MAX_RETRIES sets the number.)"
    )


def _commit(
    dataset: lance.LanceDataset, staged: Sequence[StagedFile], job_id: str, planned: int
) -> int:
    operation = LanceOperation.DataReplacement(
        [
            LanceOperation.DataReplacementGroup(
                file.fragment_id, data_file(dataset, file.path, file.field_ids)
            )
            for file in staged
        ]
    )
    transaction = Transaction(
        dataset.version,
        operation,
        transaction_properties={JOB_PROPERTY: job_id, PLANNED_PROPERTY: str(planned)},
    )
    return int(lance.LanceDataset.commit(dataset, transaction).version)


def is_conflict(error: BaseException) -> bool:
    """Whether a commit was refused because of what others committed."""
    text = str(error).lower()
    return isinstance(error, CommitConflictError) or any(
        sign in text
        for sign in (
            "commit conflict",
            "incompatible transaction",
            "fragment being replaced not found",
            "no changes were made",
        )
    )


def _landed_after_all(
    ref: TableRef, since: int, staged: Sequence[StagedFile], job_id: str
) -> int | None:
    """The version of our commit, when it failed in a way that leaves open whether it landed."""
    latest = open_dataset(ref)
    for version in range(since + 1, latest.version + 1):
        transaction = read_transaction(latest, version)
        properties = transaction.transaction_properties or {}
        if properties.get(JOB_PROPERTY) == job_id and staged[0].path in str(transaction.operation):
            return version
    return None


def verified_definition(
    schema: pa.Schema, ref: TableRef, planned: ColumnDefinition
) -> ColumnDefinition:
    """The planned column, if the table still has it; ColumnChangedError otherwise."""
    name = planned.name
    if planned.outputs and all(output in schema.names for output in planned.outputs):
        return planned
    found = read_definition(schema, name) if name in schema.names else None
    if found is None or found.uuid != planned.uuid:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} was dropped or replaced while it was being "
            "computed. The finished work is kept in the checkpoint store. Look at the table, then "
            "run the backfill again."
        )
    if found.udf_version != planned.udf_version and not planned.overrides:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} was given another UDF while it was being "
            "computed. The finished work is kept. Run the backfill again to compute it with the "
            "new one."
        )
    if found.arrow_field.type != planned.arrow_field.type:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} changed its type from "
            f"{planned.arrow_field.type} to {found.arrow_field.type} while it was being computed. "
            "Declare a UDF of the new type with alter_columns, then run the backfill again."
        )
    return planned


def _covers_live_rows(
    staged: StagedFile, ref: TableRef, dataset: lance.LanceDataset, fragment: FragmentFacts
) -> bool:
    """Whether a file that says it is complete is so for the rows that are live now."""
    named = parse_file_name(staged.path)
    if named is None or not named.complete:
        return True
    provenance = read_provenance(ref, staged.path)
    live = read_live_rows(dataset, [fragment])[fragment.id]
    return provenance is not None and not live.minus(provenance.valid)


def _is_right_anyway(
    staged: StagedFile,
    snapshot: TableSnapshot,
    fragment: FragmentFacts,
    definition: ColumnDefinition,
) -> bool:
    """Whether a file may take the place of another job's: it has all rows, by what is there now."""
    named = parse_file_name(staged.path)
    if named is None or not named.complete or definition.outputs:
        return False
    if any(path not in snapshot.field_ids for path in definition.inputs):
        return False
    inputs = [snapshot.field_ids[path] for path in definition.inputs]
    return input_signature(fragment, inputs) == staged.inputs


def _misfit(
    staged: StagedFile,
    snapshot: TableSnapshot,
    dataset: lance.LanceDataset,
    definition: ColumnDefinition,
) -> str | None:
    """Why a staged file can't be put into the table as it is now; None when it can."""
    fragment = next((f for f in snapshot.fragments if f.id == staged.fragment_id), None)
    if fragment is None:
        return "its fragment was rewritten or removed"
    if fragment.physical_rows != staged.physical_rows:
        return "its fragment has another number of rows"
    if output_field_ids(snapshot, definition) != staged.field_ids:
        return "the column's fields changed"
    if not _covers_live_rows(staged, snapshot.ref, dataset, fragment):
        return "deleted rows came back"
    # Inputs that changed are no reason: the file says what it was computed from, so that the rows
    # for which it matters are found and computed again, and only those.
    present = "\n".join(file.path for file in fragment.files_of(staged.field_ids)) or None
    if present != staged.base and not _is_right_anyway(staged, snapshot, fragment, definition):
        return "another job wrote the same column"
    return None
