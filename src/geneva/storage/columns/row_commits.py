"""Publishing new rows of a table, once: also when it is not known whether a commit landed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import lance
import pyarrow as pa
from lance import LanceOperation, Transaction
from lance.commit import CommitConflictError

from geneva.errors import TableChangedError, TableNotFoundError
from geneva.model.tables import TableRef
from geneva.storage.columns.row_files import fragments_of
from geneva.storage.lance.commit import retry_conflicts
from geneva.storage.lance.database import wants_stable_row_ids
from geneva.storage.lance.dataset import field_ids_of, is_another, nodes_of, open_dataset
from geneva.storage.lance.transactions import find_commit

WRITE_PROPERTY, APP_PROPERTY, BATCH_PROPERTY = "geneva.write", "geneva.app", "geneva.batch"
_BATCH_KEY = "geneva.batch."
"""Followed by the application's id: the table's configuration keeps its latest batch."""
_MAX_RETRIES = 20


class Change(Enum):
    """What new rows do to those that are there."""

    APPEND = auto()
    REPLACE_ROWS = auto()
    """The table keeps its columns."""
    REPLACE_TABLE = auto()
    """Everything, columns too; also: there is no table yet."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A numbered batch of an application, which lands once however often it is committed."""

    app_id: str
    number: int


@dataclass(frozen=True, slots=True)
class RowsToCommit:
    """New rows, and what they were planned on."""

    change: Change
    schema: pa.Schema
    """The columns that the rows have, in the table's types."""
    write_id: str
    """Of this write and no other, in the transaction's properties."""
    planned_version: int
    """0: there was no table."""
    field_ids: dict[str, tuple[int, ...]]
    """Of the columns that the rows have, as they were planned."""
    first_file: str | None = None
    """What `first_file` says of the planned version: a table made anew has none of the files that
    were staged in the one before. None: nobody knows."""


def create_table(ref: TableRef, schema: pa.Schema) -> lance.LanceDataset:
    """Make an empty table. Of several who try at once one succeeds, and all go on with it."""
    try:
        return _created(ref, Transaction(0, LanceOperation.Overwrite(schema, [])))
    except OSError:
        try:
            return open_dataset(ref)
        except TableNotFoundError:
            pass
        raise


def appended(
    ref: TableRef, rows: RowsToCommit, table: lance.LanceDataset, staged: Sequence[str]
) -> RowsToCommit:
    """Rows that were staged for a table to be created, to append to it now that it is there."""
    ids = field_ids_of(table)
    planned = {name: ids[name] for name in rows.schema.names if name in ids}
    fields = [i for name in rows.schema.names for i in planned.get(name, (-1,))]
    files = [file for text in staged for part in json.loads(text) for file in part["files"]]
    if any(file["fields"] != fields for file in files):
        raise TableChangedError(
            f"Table {ref.name!r} was created by somebody else, with other columns, while its rows "
            "were being written. Nothing was written: write again."
        )
    version = int(table.version)
    return RowsToCommit(Change.APPEND, rows.schema, rows.write_id, version, planned)


def _created(ref: TableRef, transaction: Transaction) -> lance.LanceDataset:
    return lance.LanceDataset.commit(
        ref.uri,
        transaction,
        max_retries=0,
        storage_options=ref.storage_options.plain(),
        enable_stable_row_ids=wants_stable_row_ids(ref.storage_options),
    )


def commit_rows(
    ref: TableRef, rows: RowsToCommit, staged: Sequence[str], batch: Batch | None = None
) -> bool:
    """Publish staged rows in one commit; False: the batch has landed before, and nothing is done.

    A numbered batch is announced in the table's configuration before it is committed, and noted as
    landed after it. Whoever finds it announced looks for its commit in the table's history.
    """
    if batch is not None and _has_landed(ref, batch):
        return False
    fragments = fragments_of(staged)
    if not fragments and rows.change is Change.APPEND:
        return True
    if batch is not None:
        _note(ref, batch, landed=False)
    properties = {WRITE_PROPERTY: rows.write_id}
    if batch is not None:
        properties |= {APP_PROPERTY: batch.app_id, BATCH_PROPERTY: str(batch.number)}
    _commit_once(ref, rows, fragments, properties)
    if batch is not None:
        _note(ref, batch, landed=True)
    return True


def _commit_once(
    ref: TableRef, rows: RowsToCommit, fragments: list[Any], properties: dict[str, str]
) -> None:
    attempts = 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        dataset = None
        if rows.planned_version:
            dataset = open_dataset(ref)
            # A conflict may be with this very commit, tried again below us.
            if attempts > 1 and _is_there(dataset, rows):
                return
            _check_table(ref, rows)
            _check_columns(ref, rows, dataset)
        operation = _operation(rows, fragments, dataset)
        version = 0 if dataset is None else int(dataset.version)
        transaction = Transaction(version, operation, transaction_properties=properties)
        try:
            if dataset is None:
                _created(ref, transaction)
            else:
                lance.LanceDataset.commit(dataset, transaction)
        except OSError as error:
            now = _opened(ref)
            if _is_there(now, rows):
                return
            if dataset is None and now is not None:
                raise TableChangedError(
                    f"Table {ref.name!r} was created by somebody else while its rows were being "
                    "written. Nothing was written: look at it, then write again."
                ) from error
            raise

    retry_conflicts(attempt, _MAX_RETRIES)


def _opened(ref: TableRef) -> lance.LanceDataset | None:
    try:
        return open_dataset(ref)
    except TableNotFoundError:
        return None


def _is_there(dataset: lance.LanceDataset | None, rows: RowsToCommit) -> bool:
    """Whether a commit is there that failed in a way that leaves open whether it landed."""
    if dataset is None:
        return False
    return bool(
        find_commit(
            dataset,
            rows.planned_version,
            lambda found: found.get(WRITE_PROPERTY) == rows.write_id,
        ).version
    )


def _check_table(ref: TableRef, rows: RowsToCommit) -> None:
    """Refuse to commit files to another table than the one in whose folder they were."""
    first = rows.first_file
    if first is not None and is_another(ref, rows.planned_version, first):
        raise TableChangedError(
            f"Table {ref.name!r} was dropped and made anew while rows were being written. Nothing "
            "was written: write again."
        )


def _check_columns(ref: TableRef, rows: RowsToCommit, dataset: lance.LanceDataset) -> None:
    """Refuse to commit files whose columns mean something else by now."""
    if rows.change is Change.REPLACE_TABLE:
        return
    now = field_ids_of(dataset)
    for field in rows.schema:
        same = field.name in dataset.schema.names and (
            now.get(field.name) == rows.field_ids[field.name]
            and dataset.schema.field(field.name).type == field.type
        )
        if not same:
            raise TableChangedError(
                f"Column {field.name!r} of table {ref.name!r} was dropped, replaced or re-typed "
                "while rows were being written. Nothing was written: write again."
            )


def _operation(rows: RowsToCommit, fragments: list[Any], dataset: Any) -> Any:
    match rows.change:
        case Change.APPEND:
            return LanceOperation.Append(fragments)
        case Change.REPLACE_TABLE:
            return LanceOperation.Overwrite(rows.schema, fragments)
        case Change.REPLACE_ROWS:
            return LanceOperation.Update(
                removed_fragment_ids=[f.fragment_id for f in dataset.get_fragments()],
                new_fragments=fragments,
                # Of columns that are not named Lance takes indexes to cover the new fragments.
                fields_for_preserving_frag_bitmap=[*nodes_of(dataset.lance_schema).values()],
                update_mode="rewrite_rows",
            )


# ------------------------------------------------------------------------------------ batches


@dataclass(frozen=True, slots=True)
class _Noted:
    """The latest batch of an application, as the table's configuration has it."""

    number: int
    landed: bool
    since: int
    """The version at which it was announced: its commit, if there is one, is after it."""


def _has_landed(ref: TableRef, batch: Batch) -> bool:
    dataset = open_dataset(ref)
    noted = _noted(dataset, batch.app_id)
    if noted is None or noted.number < batch.number:
        return False
    if noted.number > batch.number or noted.landed:
        return True  # batches of an application come one after the other

    def is_it(found: dict[str, str]) -> bool:
        ours = (batch.app_id, str(batch.number))
        return (found.get(APP_PROPERTY), found.get(BATCH_PROPERTY)) == ours

    search = find_commit(dataset, noted.since, is_it)
    if search.version is None and not search.complete:
        raise TableChangedError(
            f"Batch {batch.number} of application {batch.app_id!r} was begun before, and it can't "
            f"be known whether it landed in table {ref.name!r}: the versions since were cleaned "
            "up. Look whether its rows are there. If they are, go on with the next batch; if not, "
            "write them once without app_id and batch_id."
        )
    return search.version is not None


def _noted(dataset: lance.LanceDataset, app_id: str) -> _Noted | None:
    text = dataset.config().get(_BATCH_KEY + app_id)
    if text is None:
        return None
    record = json.loads(text)
    return _Noted(record["batch"], record["landed"], record["since"])


def _note(ref: TableRef, batch: Batch, *, landed: bool) -> None:
    def attempt() -> None:
        dataset = open_dataset(ref)
        noted = _noted(dataset, batch.app_id)
        if noted is not None and noted.number > batch.number:
            raise CommitConflictError("a later batch has begun")
        announced = noted is not None and noted.number == batch.number
        if announced and not landed:
            return
        since = noted.since if noted is not None and announced else int(dataset.version)
        record = {"batch": batch.number, "landed": landed, "since": since}
        updates = {_BATCH_KEY + batch.app_id: json.dumps(record)}
        operation = LanceOperation.UpdateConfig(
            config_updates=LanceOperation.UpdateMap(updates=updates, replace=False)
        )
        lance.LanceDataset.commit(dataset, Transaction(dataset.version, operation))

    retry_conflicts(attempt, _MAX_RETRIES)
