"""Publishing staged column files: the only place where a backfill changes the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import lance
import pyarrow as pa
from lance import LanceOperation, Transaction
from lance.commit import CommitConflictError

from geneva.errors import ColumnChangedError, UDFOutputError
from geneva.model.computation import Carry, Computation, Load, Output
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.storage.columns.definitions import present_column, read_definition
from geneva.storage.columns.dictionaries import DistinctValues, has_narrow_dictionary
from geneva.storage.columns.lost_files import missing_files
from geneva.storage.columns.provenance import named, output_file, parse_file_name, read_provenance
from geneva.storage.columns.staged_files import StagedFile, data_file, read_columns, stage_nulls
from geneva.storage.lance.commit import is_conflict, retry_conflicts
from geneva.storage.lance.damage import Damaged, reading
from geneva.storage.lance.dataset import (
    FragmentFacts,
    TableSnapshot,
    check_not_dropped,
    file_path,
    has_column,
    open_dataset,
    read_live_rows,
    read_snapshot,
)
from geneva.storage.lance.history import read_commit
from geneva.storage.lance.own_commits import is_own_commit, note_own_commit
from geneva.storage.lance.transactions import JOB_PROPERTY, PLANNED_PROPERTY, job_of
from geneva.udf.types import value_type


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What became of a group of staged files."""

    landed: tuple[StagedFile, ...]
    lost: tuple[tuple[StagedFile, str], ...]
    """Files that no longer fit the table, each with what happened to their fragment."""
    moved_on: bool
    """Whether somebody else committed in between, or deleted files."""
    deleted: tuple[StagedFile, ...] = ()
    """Files that were not there any more when they were to be committed."""


def commit_columns(
    ref: TableRef,
    dataset: lance.LanceDataset,
    computation: Computation,
    staged: Sequence[StagedFile],
    job_id: str,
    max_retries: int,
) -> CommitOutcome:
    """Replace the data files of several fragments in one commit. All have the same fields.

    The planned version is the read version, so that Lance itself checks everything that happened
    since. Where it refuses, each file is checked against the latest version; those that still fit
    are committed on top of it, the others are handed back. So are all of them when other writers
    keep getting in between: what was computed is kept, and found by the next plan.
    """
    commit = _ColumnCommit(ref, dataset, computation, staged, job_id)
    try:
        # One more than retries: giving NULLs to missing fields is no conflict with others.
        return retry_conflicts(commit.attempt, max_retries + 1, _Outrun())
    except _Outrun:
        return commit.given_up()


class _Outrun(Exception):
    """Other writers kept getting in between."""


class _ColumnCommit:
    """A commit that is tried until it lands: the files that still fit, and on which version."""

    def __init__(
        self,
        ref: TableRef,
        planned: lance.LanceDataset,
        computation: Computation,
        staged: Sequence[StagedFile],
        job_id: str,
    ) -> None:
        self._ref, self._computation, self._job_id = ref, computation, job_id
        self._planned_version = int(planned.version)
        self._base = planned
        self._fitting, self._lost = list(staged), list[tuple[StagedFile, str]]()
        self._deleted: list[StagedFile] = []
        self._attempts = 0
        self._moved_on = False

    def attempt(self) -> CommitOutcome:
        """Commit what fits: on the planned version at first, then on the latest one."""
        if self._attempts:
            self._rebase()
        self._attempts += 1
        if self._fitting:
            check_not_dropped(self._ref, self._base)
            self._leave_out_missing()
        if not self._fitting:
            return self._outcome()
        try:
            if add_missing_fields(self._ref, self._base, self._fitting):
                # After a commit of its own it looks at the table anew, as after one of others.
                raise CommitConflictError("fields were added that fragments had no file for")
            self._check_dictionaries()
            version = _commit(self._base, self._fitting, self._job_id, self._planned_version)
        except OSError as error:
            if is_conflict(error) or not self._has_landed():
                raise
            self._moved_on = True
        else:
            note_own_commit(self._ref.uri, version, self._job_id)
            self._moved_on = self._moved_on or self._others_came_before(version)
        return self._outcome()

    def _leave_out_missing(self) -> None:
        """Publish no file that is not there: the table could not be read any more."""
        gone = missing_files(self._ref, [f.path for f in self._fitting], self._base)
        if gone:
            self._moved_on = True
            self._deleted += [file for file in self._fitting if file.path in gone]
            self._fitting = [file for file in self._fitting if file.path not in gone]

    def _others_came_before(self, version: int) -> bool:
        """Whether a commit between the version read and the one written is not of this job."""
        between, ref, job_id = range(self._base.version + 1, version), self._ref, self._job_id
        return not all(
            is_own_commit(ref, number, job_id) or _is_of_job(ref, number, job_id)
            for number in between
        )

    def given_up(self) -> CommitOutcome:
        """Nothing is committed: others were faster every time."""
        left = [(file, "other writers kept getting in between") for file in self._fitting]
        lost, deleted = (*self._lost, *left), tuple(self._deleted)
        return CommitOutcome((), lost, moved_on=True, deleted=deleted)

    def _outcome(self) -> CommitOutcome:
        lost, deleted = tuple(self._lost), tuple(self._deleted)
        return CommitOutcome(tuple(self._fitting), lost, self._moved_on, deleted)

    def _rebase(self) -> None:
        """Go on from the latest version, without the files that don't fit it."""
        ref, computation = self._ref, self._computation
        self._moved_on = True
        refused, self._base = self._base, open_dataset(ref)
        if self._attempts > 1 and self._base.version == refused.version:
            raise ColumnChangedError(
                f"Lance can't put the values of column {computation.name!r} into table "
                f"{ref.name!r}, though nobody has changed it: its fields were changed since it was "
                "declared (a struct that got a child). Drop the column, and add it again."
            )
        snapshot = read_snapshot(self._base, ref)
        verify_column(snapshot.schema, ref, computation)
        facts = {fragment.id: fragment for fragment in snapshot.fragments}
        checked = [
            (f, _misfit(f, facts.get(f.fragment_id), snapshot, self._base, computation))
            for f in self._fitting
        ]
        self._lost.extend((file, why) for file, why in checked if why is not None)
        self._fitting = [file for file, why in checked if why is None]

    def _check_dictionaries(self) -> None:
        """Refuse values that fit into each file, and not into the column as a whole.

        A file of an older version of the function will be replaced: its values don't count.
        """
        ref, computation = self._ref, self._computation
        kinds = [output.type for output in computation.outputs]
        if isinstance(computation.program, Carry) or not has_narrow_dictionary(kinds):
            return
        distinct = DistinctValues(self._base)
        replaced = {file.fragment_id for file in self._fitting}
        for fragment in read_snapshot(self._base, ref).fragments:
            if fragment.id not in replaced and not _is_outdated(computation, fragment):
                for batch in _readable_batches(self._base, fragment, computation):
                    distinct.add(batch)
        for file in self._fitting:
            at = 0
            for batch in read_columns(ref, file.path):
                overflow = distinct.add(batch)
                if overflow is not None:
                    raise UDFOutputError(
                        f"Table {ref.name!r}, column {computation.name!r}, fragment "
                        f"{file.fragment_id}, row {at + overflow.row}: together with the values of "
                        f"other fragments, {overflow}."
                    )
                at += batch.num_rows

    def _has_landed(self) -> bool:
        """Whether a commit is there that failed in a way that leaves open whether it landed."""
        latest = open_dataset(self._ref)
        for version in range(self._planned_version + 1, latest.version + 1):
            commit = read_commit(latest, version)
            if commit is None or job_of(commit) != self._job_id:
                continue
            if self._fitting[0].path in str(commit.operation):
                return True
        # The commit may have been cleaned up since, and its files not.
        files = (file for f in latest.get_fragments() for file in f.metadata.files)
        return any(file_path(file) == self._fitting[0].path for file in files)


@lru_cache(maxsize=4_096)
def _is_of_job(ref: TableRef, version: int, job_id: str) -> bool:
    """Whether a job committed a version. Kept: each of its later commits comes after it."""
    commit = read_commit(open_dataset(ref), version)
    return commit is not None and job_of(commit) == job_id  # cleaned up: nobody can say


def _is_outdated(computation: Computation, fragment: FragmentFacts) -> bool:
    """Whether all values of a fragment were made by another version of the function."""
    paths = [file.path for file in fragment.files_of(computation.output_ids)]
    names = [parse_file_name(path) for path in paths]
    wanted = named(computation.id, computation.version, ())
    return all(
        name is not None and name.column == wanted.column and name.udf != wanted.udf
        for name in names
    )


def _readable_batches(
    dataset: lance.LanceDataset, fragment: FragmentFacts, computation: Computation
) -> Iterator[pa.RecordBatch]:
    """The column's values in a fragment, as far as they can be read."""
    columns = [output.name for output in computation.outputs]
    with suppress(Damaged):
        yield from reading(dataset.get_fragment(fragment.id).to_batches(columns=columns))


def _commit(
    dataset: lance.LanceDataset, staged: Sequence[StagedFile], job_id: str, planned: int
) -> int:
    operation = LanceOperation.DataReplacement(
        [
            LanceOperation.DataReplacementGroup(
                file.fragment_id,
                data_file(dataset, file.path, file.field_ids, file.size_bytes),
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


def add_missing_fields(
    ref: TableRef, dataset: lance.LanceDataset, staged: Sequence[StagedFile]
) -> bool:
    """Give NULLs to the fields that a fragment has no file for, while it has one for others.

    Lance replaces fields that are all there or all new: values that a person appended have no
    receipts beside them. That there are none is what NULLs say, too. Returns whether any did.
    """
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for file in staged:
        fragment = dataset.get_fragment(file.fragment_id)
        if fragment is None:
            continue
        there = {i for data in fragment.metadata.files for i in data.fields}
        missing = tuple(i for i in file.field_ids if i not in there)
        if missing and len(missing) < len(file.field_ids):
            groups.setdefault(missing, []).append((file.fragment_id, file.physical_rows))
    for fields, fragments in groups.items():
        operation = LanceOperation.DataReplacement(
            [
                LanceOperation.DataReplacementGroup(
                    fragment_id,
                    data_file(dataset, stage_nulls(ref, dataset, fields, rows), fields),
                )
                for fragment_id, rows in fragments
            ]
        )
        dataset = lance.LanceDataset.commit(dataset, Transaction(dataset.version, operation))
    return bool(groups)


def verify_column(schema: pa.Schema, ref: TableRef, planned: Computation) -> None:
    """Make sure that the table still has what was planned; ColumnChangedError otherwise."""
    name = planned.name
    if isinstance(planned.program, Load):
        _verify_loaded(schema, ref, planned)
        return
    if isinstance(planned.program, Carry):
        missing = [o.name for o in planned.outputs if not has_column(schema, o.name)]
        if missing:
            raise ColumnChangedError(
                f"Column {missing[0]!r} of view {ref.name!r} is gone. Create the view anew."
            )
        return
    found = [(output, _same_column(schema, output)) for output in planned.outputs]
    there = [(output, definition) for output, definition in found if definition is not None]
    if not there:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} was dropped or replaced while it was being "
            "computed. One that was added under its name is another column: its own backfill "
            "computes it."
        )
    for output, definition in there:
        _verify_definition(ref, planned, output, definition)


def _same_column(schema: pa.Schema, output: Output) -> ColumnDefinition | None:
    """The definition of the very column that was planned, by its present name; None: it is gone."""
    name = present_column(schema, output.column_id, output.name)
    return read_definition(schema, name) if name is not None else None


def _verify_definition(
    ref: TableRef, planned: Computation, output: Output, found: ColumnDefinition
) -> None:
    name = output.name
    if planned.source is None and found.udf_version != planned.version and not planned.is_override:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} was given another UDF while it was being "
            "computed. The finished work is kept. Run the backfill again to compute it with the "
            "new one."
        )
    if value_type(found.arrow_field.type) != output.type:
        raise ColumnChangedError(
            f"Column {name!r} of table {ref.name!r} changed its type from "
            f"{output.type} to {found.arrow_field.type} while it was being computed. "
            "Declare a UDF of the new type with alter_columns, then run the backfill again."
        )


def _verify_loaded(schema: pa.Schema, ref: TableRef, planned: Computation) -> None:
    """Make sure that columns can still be loaded; ColumnChangedError otherwise."""
    for output in planned.outputs:
        there = has_column(schema, output.name)
        if not there or value_type(schema.field(output.name).type) != output.type:
            what = "changed its type" if there else "was dropped or renamed"
        elif read_definition(schema, output.name) is not None:
            what = "became a computed column"
        else:
            continue
        raise ColumnChangedError(
            f"Column {output.name!r} of table {ref.name!r} {what} while it was being loaded. Look "
            "at the table, then load it again."
        )


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


def _fields_now(snapshot: TableSnapshot, output: Output) -> tuple[int, ...] | None:
    """The field ids that a column has now; None: it is gone. A computed one may be renamed."""
    column = output.column_id
    name = present_column(snapshot.schema, column, output.name) if column else output.name
    return snapshot.field_ids.get(name) if name is not None else None


def _misfit(
    staged: StagedFile,
    fragment: FragmentFacts | None,
    snapshot: TableSnapshot,
    dataset: lance.LanceDataset,
    computation: Computation,
) -> str | None:
    """Why a staged file can't be put into the table as it is now; None when it can."""
    if fragment is None:
        return "its fragment was rewritten or removed"
    if fragment.physical_rows != staged.physical_rows:
        return "its fragment has another number of rows"
    if any(_fields_now(snapshot, o) != o.field_ids for o in computation.written):
        return "the column's fields changed"
    if not _covers_live_rows(staged, snapshot.ref, dataset, fragment):
        return "deleted rows came back"
    # Inputs that changed are no reason: the file says what it was computed from, so that the rows
    # for which it matters are found and computed again, and only those.
    # What another job or a person wrote stays. What was computed is found again by its receipts.
    if output_file(computation, fragment) != staged.base:
        return "somebody wrote the same column"
    return None
