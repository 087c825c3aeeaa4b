"""View tables: the definition in their schema metadata, the rows that they hold, their source.

A view is a normal Lance table. Its rows begin as placeholders that hold only which source row they
are made of: the other columns have no file, so that one DataReplacement can fill them all together
with `__is_set`. (Lance takes a file whose fields are all new to a fragment, or all there already;
a mixture it refuses. That is why a placeholder's `__is_set` is NULL, and not stored as false.)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance import LanceOperation, Transaction

from geneva.errors import TableChangedError, UserInputError
from geneva.model.computation import RECEIPT_PREFIX
from geneva.model.rows import Mask, RowSet
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.model.view_query import (
    IS_SET,
    SOURCE_ROW_ID,
    SYSTEM_COLUMNS,
    ColumnKind,
    ViewColumn,
    ViewQuery,
)
from geneva.storage.columns.definitions import (
    LANCEDB_VIEW_KEY,
    FunctionSource,
    column_uuid,
    define_columns,
    defined_field,
    read_definitions,
    receipt_field,
    with_present_inputs,
)
from geneva.storage.lance.dataset import (
    Dataset,
    FieldsNow,
    first_file,
    has_versions,
    open_dataset,
    quote_path,
)
from geneva.storage.lance.fragments import BLOB_KEY, field_at, is_blob
from geneva.storage.lance.history import commit_uuid, read_commit
from geneva.storage.lance.own_commits import note_own_commit
from geneva.storage.lance.transactions import JOB_PROPERTY
from geneva.storage.lance.trial import why_not_storable
from geneva.udf.declare import UDF

_KEY = "geneva::view::"
QUERY_KEY = f"{_KEY}query"
BASE_TABLE_KEY = f"{_KEY}base_table"
BASE_DB_KEY = f"{_KEY}base_table_db_uri"
BASE_VERSION_KEY = f"{_KEY}base_table_version"
FORMAT_KEY = f"{_KEY}version"
_UUID_KEY = f"{_KEY}uuid"

ROW_ADDRESSES, STABLE_ROW_IDS = "1", "2"
"""The view formats: what `__source_row_id` holds, and so whether other versions can be read."""

READS_SOURCE = "virtual_column.udf_source"
"""Metadata key of a computed column whose inputs are columns of the view's source."""

DEFAULT_FRAGMENT_ROWS = 65_536
"""Rows of a fragment of new rows: enough for one file, and few enough to share them out."""
_MAX_NEW_FRAGMENTS = 1_024
_BATCH_ROWS = 100_000
_BLOB_FORMAT = "2.1"
"""The format of views with blobs."""
_SELECTED_FROM = f"{_KEY}selected_from"
"""Of the commit of a view's first placeholders: which commit of the source they stand for."""

_SYSTEM_SCHEMA = pa.schema([pa.field(SOURCE_ROW_ID, pa.int64()), pa.field(IS_SET, pa.bool_())])
_NOT_COPIED = ("virtual_column", "computed_column", "lance-schema:")
"""Field metadata of the source that would be wrong on a view's copy of the column."""


# ----------------------------------------------------------------------------- the definition


@dataclass(frozen=True, slots=True)
class ViewInfo:
    """What a view's schema metadata holds."""

    query: ViewQuery
    base_version: int
    """The source version that the last finished refresh was to; before any, that of creation."""
    format_version: str
    uuid: str
    """Identity: another view of the same name has another one."""


def create_view_table(
    ref: TableRef,
    schema: pa.Schema,
    query: ViewQuery,
    base_version: int,
    format_version: str,
    *,
    with_receipts: bool = True,
) -> str:
    """Make the empty table of a view: `schema`, the system columns, the definition.

    Returns its identity.

    `schema` has the user's columns: those of the source as `copied_field` gives them, UDF columns
    as `source_udf_fields` does. Views have stable row ids, so that views of views can be kept.
    """
    own, storage_version = _storable([field.with_nullable(True) for field in schema])
    computed = [column for column in map(column_uuid, own) if column is not None]
    receipts = [receipt_field(column) for column in computed] if with_receipts else []
    fields = [*_SYSTEM_SCHEMA, *own, *receipts]
    identity = uuid.uuid4().hex
    metadata = {
        QUERY_KEY: query.to_json(),
        BASE_TABLE_KEY: query.base_table,
        BASE_DB_KEY: query.base_db_uri,
        BASE_VERSION_KEY: str(base_version),
        FORMAT_KEY: format_version,
        _UUID_KEY: identity,
    }
    create_empty(ref, pa.schema(fields, metadata=metadata), storage_version)
    return identity


def create_empty(ref: TableRef, schema: pa.Schema, storage_version: str | None = None) -> Dataset:
    """Make an empty table with stable row ids; refused where there is one already."""
    try:
        return lance.write_dataset(
            schema.empty_table(),
            ref.uri,
            mode="create",
            enable_stable_row_ids=True,
            data_storage_version=storage_version,
            storage_options=ref.storage_options.plain(),
        )
    except OSError as error:
        if "already exists" not in str(error):
            raise
        raise _exists(ref) from error


def _exists(ref: TableRef) -> UserInputError:
    return UserInputError(
        f"There is a table or view {ref.name!r} already. Drop it first, or take another name."
    )


def remove_hidden(outer: TableRef, hidden: Iterable[TableRef]) -> None:
    """Remove hidden tables that a view has which was not made to the end: its process died."""
    left = [ref for ref in hidden if has_versions(ref)]
    if has_versions(outer):
        raise _exists(outer)
    for ref in left:
        lance.LanceDataset.drop(ref.root, ref.storage_options.plain(), ignore_not_found=True)


def check_hidden(outer: TableRef, identities: Mapping[TableRef, str]) -> None:
    """Refuse to make a view of hidden ones that are not those that were made for it."""
    for ref, identity in identities.items():
        info = read_view(open_dataset(ref).schema)
        if info is None or info.uuid != identity:
            raise TableChangedError(
                f"View {outer.name!r} was created by somebody else at the same time. Open it, or "
                "drop it and create it anew."
            )


def _storable(fields: list[pa.Field]) -> tuple[list[pa.Field], str | None]:
    """The columns of a view as they can be stored, and in which format; None: Lance's default.

    Blobs of format 2.2 can't be filled file by file, those of 2.1 can. Where another column can't
    be stored in that (a map), the view has blobs as plain binary columns.
    """
    if not any(is_blob(field) for field in fields):
        return fields, None
    if all(why_not_storable(_BLOB_FORMAT, field.type) is None for field in fields):
        return fields, _BLOB_FORMAT
    return [_inline(field) for field in fields], None


def _inline(field: pa.Field) -> pa.Field:
    kept = {k: v for k, v in (field.metadata or {}).items() if k != BLOB_KEY}
    return field.with_metadata(kept or None)


def copied_field(source: pa.Schema, path: str, name: str) -> pa.Field:
    """A column of the source as a view has it: nullable, and computed no more."""
    found = field_at(source, path)
    kept = {
        key: value
        for key, value in (found.metadata or {}).items()
        if not key.decode().startswith(_NOT_COPIED)
    }
    kind = found.type
    if is_blob(found):
        kind, kept = pa.large_binary(), {**kept, BLOB_KEY: b"true"}
    return pa.field(name, kind, nullable=True, metadata=kept or None)


def source_udf_fields(
    source: lance.LanceDataset, names: Mapping[str, str], udf: UDF, function: FunctionSource
) -> dict[str, pa.Field]:
    """A view's columns that one call of a UDF computes from the source's columns.

    `names` are theirs, and of the fields of the function's record that they hold.
    """
    columns = define_columns(FieldsNow.of(source), names, udf, function)
    made = ((column.name, defined_field(column)) for column in columns)
    reads = {READS_SOURCE.encode(): b"base_table"}
    return {name: field.with_metadata({**field.metadata, **reads}) for name, field in made}


def reads_source(arrow_field: pa.Field) -> bool:
    """Whether a view's column is computed from the source, and not from the view's own columns."""
    return READS_SOURCE.encode() in (arrow_field.metadata or {})


def present_definitions(dataset: lance.LanceDataset) -> dict[str, ColumnDefinition]:
    """Every computed column, with its inputs as they are called now: they may have been renamed.

    A view's columns that are computed from its source have the names of the source's columns.
    """
    fields = FieldsNow.of(dataset)
    return {
        name: found if reads_source(found.arrow_field) else with_present_inputs(found, fields)
        for name, found in read_definitions(dataset.schema).items()
    }


def read_view(schema: pa.Schema) -> ViewInfo | None:
    """Read the definition of a view from its schema; None for a plain table."""
    stored = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items() if _is_view_key(k)}
    if QUERY_KEY not in stored:
        return None
    return ViewInfo(
        query=ViewQuery.from_json(stored[QUERY_KEY]),
        base_version=int(stored[BASE_VERSION_KEY]),
        format_version=stored[FORMAT_KEY],
        uuid=stored[_UUID_KEY],
    )


def _is_view_key(key: bytes) -> bool:
    return key.startswith(_KEY.encode())


def is_view(schema: pa.Schema) -> bool:
    """Whether a table is a view."""
    return QUERY_KEY.encode() in (schema.metadata or {})


class ViewKind(StrEnum):
    """Whose view it is."""

    GENEVA = "geneva"
    """Of a query that may have UDFs; `refresh` runs on Spark."""
    UDTF = "udtf"
    """The same, of the rows that a table function makes."""
    LANCEDB = "lancedb"
    """LanceDB's own, of SQL."""


class ViewName(str):
    """The name of a view, which says whose view it is."""

    __slots__ = ("kind",)
    kind: ViewKind

    def __new__(cls, name: str, kind: ViewKind) -> ViewName:
        """Keep a view's name and kind."""
        self = super().__new__(cls, name)
        self.kind = kind
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the kind."""
        return ViewName, (str(self), self.kind)


_UDTF_COLUMN = b'"kind": "udtf"'
"""What stands in the query of a view of a table function."""


def view_kind(schema: pa.Schema) -> ViewKind | None:
    """Whose view a table is; None: it is none."""
    if is_view(schema):
        # Not by reading the query: a view whose query can't be read is listed, too.
        is_udtf = _UDTF_COLUMN in schema.metadata[QUERY_KEY.encode()]
        return ViewKind.UDTF if is_udtf else ViewKind.GENEVA
    return ViewKind.LANCEDB if LANCEDB_VIEW_KEY in (schema.metadata or {}) else None


def is_hidden(name: str) -> bool:
    """Whether a column is one of Geneva's own: of a view's system, or of receipts."""
    return name in SYSTEM_COLUMNS or name.startswith(RECEIPT_PREFIX)


def visible_schema(schema: pa.Schema) -> pa.Schema:
    """A table's schema as a user sees it: without the columns that are Geneva's own."""
    view = is_view(schema)
    kept = [
        field
        for field in schema
        if not field.name.startswith(RECEIPT_PREFIX) and not (view and field.name in SYSTEM_COLUMNS)
    ]
    return schema if len(kept) == len(schema) else pa.schema(kept, metadata=schema.metadata)


def source_expression(column: ViewColumn, source: pa.Schema) -> str:
    """What to read of a source for a column that is carried over, as Lance's SQL."""
    is_path = column.kind is ColumnKind.COLUMN
    return quote_path(column.expression, source) if is_path else column.expression


# ------------------------------------------------------------------------------------ the rows


@dataclass(frozen=True, slots=True)
class FragmentRows:
    """The rows of a view's fragment, by physical offset; deleted ones are there, but not live."""

    fragment_id: int
    source_ids: npt.NDArray[np.int64]
    live: Mask

    def live_ids(self) -> npt.NDArray[np.uint64]:
        """The source rows that the fragment shows, in its order."""
        return self.source_ids[self.live].astype(np.uint64)


def append_placeholders(
    ref: TableRef,
    dataset: lance.LanceDataset,
    source_ids: npt.NDArray[Any],
    max_rows_per_fragment: int | None = None,
    job_id: str = "",
    selected_from: lance.LanceDataset | None = None,
) -> lance.LanceDataset:
    """Add a placeholder row for each source row, in order, in one commit; return the new version.

    Nothing is committed where there are no ids. `selected_from`: the ids are all rows that the
    view's query selects from this version of its source, which is recorded with them.
    """
    if not len(source_ids):
        return dataset
    properties = {JOB_PROPERTY: job_id}
    if selected_from is not None and not dataset.get_fragments():
        identity = _identity_of(selected_from)
        properties |= {_SELECTED_FROM: identity} if identity is not None else {}
    schema = pa.schema([_SYSTEM_SCHEMA.field(SOURCE_ROW_ID)])
    ids = source_ids.astype(np.int64, copy=False)
    batches = (
        pa.record_batch([pa.array(ids[at : at + _BATCH_ROWS])], schema=schema)
        for at in range(0, len(ids), _BATCH_ROWS)
    )
    made = lance.write_dataset(
        pa.RecordBatchReader.from_batches(schema, batches),
        dataset,
        mode="append",
        max_rows_per_file=fragment_rows(len(ids), max_rows_per_fragment),
        storage_options=ref.storage_options.plain(),
        transaction_properties=properties,
    )
    note_own_commit(ref.uri, made.version, job_id)
    return made


def allow_nulls(view: Dataset) -> Dataset:
    """Let all columns of a view take NULLs, also one that was added of a constant, say.

    Returns the view as it is then. New rows have no value of columns that are not the query's.
    """
    strict = [field.name for field in view.schema if not field.nullable]
    if strict:
        view.alter_columns(*({"path": name, "nullable": True} for name in strict))
    return view


def shows_all_of(view: lance.LanceDataset, source: lance.LanceDataset) -> bool:
    """Whether a view is known to have just the rows that its query selects from its source.

    That is so while it is as it was made, of this version of the source.
    """
    made = read_commit(view, int(view.version))
    # Not where another commit got in between.
    if made is None or int(made.read_version) + 1 != int(view.version):
        return False
    selected_from = (made.transaction_properties or {}).get(_SELECTED_FROM)
    return selected_from is not None and bool(selected_from == _identity_of(source))


def _identity_of(dataset: lance.LanceDataset) -> str | None:
    """A version of a table, and the commit that made it: the number may come again.

    The commit is read from the store: its first file says that it is this very table's. None where
    it can't be read: what is in its place may be another one's, of another size.
    """
    version = int(dataset.version)
    try:
        uuid = commit_uuid(dataset, version)
    except (OSError, ValueError):
        return None
    return f"{version} {uuid} {first_file(dataset)}" if uuid else None


def fragment_rows(count: int, max_rows: int | None) -> int:
    """Rows of each fragment that `count` placeholders are put into."""
    return max_rows or max(DEFAULT_FRAGMENT_ROWS, -(-count // _MAX_NEW_FRAGMENTS))


def delete_view_rows(
    dataset: lance.LanceDataset, rows: Mapping[int, RowSet], job_id: str = ""
) -> int:
    """Delete rows, given by fragment, in one commit; return the version.

    Deleting a row again does no harm. A fragment that is left without rows goes as a whole.
    """
    changed, gone = [], []
    for fragment_id, members in rows.items():
        if not members:
            continue
        fragment = dataset.get_fragment(fragment_id)
        if fragment is None:
            raise TableChangedError(
                f"Fragment {fragment_id} of {dataset.uri} is gone since the refresh looked at it. "
                "Refresh the view again."
            )
        left = fragment.delete_rows(members.offsets().tolist())
        if left is None:
            gone.append(fragment_id)
        else:
            changed.append(left)
    if not changed and not gone:
        return int(dataset.version)
    operation = LanceOperation.Delete(changed, gone, "rows that left the view")
    transaction = Transaction(
        dataset.version, operation, transaction_properties={JOB_PROPERTY: job_id}
    )
    return int(lance.LanceDataset.commit(dataset, transaction).version)


def read_source_ids(
    dataset: lance.LanceDataset, fragment_id: int | None = None
) -> list[FragmentRows]:
    """Which source row each row of a view is made of, fragment by fragment, in order."""
    fragments = dataset.get_fragments()
    if fragment_id is not None:
        fragments = [dataset.get_fragment(fragment_id)]
    counts = [int(fragment.physical_rows) for fragment in fragments]
    total = sum(counts)
    ids = np.zeros(total, dtype=np.int64)
    live = np.ones(total, dtype=np.bool_)
    at = 0
    for batch in _scan_physical(dataset, [SOURCE_ROW_ID], fragments):
        rows = slice(at, at + batch.num_rows)
        # A row that somebody added by hand may stand for none.
        ids[rows] = batch.column(SOURCE_ROW_ID).fill_null(-1).to_numpy(zero_copy_only=False)
        live[rows] = batch.column("_rowid").is_valid().to_numpy(zero_copy_only=False)
        at += batch.num_rows
    if at != total:
        raise OSError(f"{dataset.uri} gave {at} rows, but its fragments say {total}")
    ends = np.cumsum(counts).tolist()
    return [
        FragmentRows(fragment.fragment_id, ids[a:b], live[a:b])
        for fragment, a, b in zip(fragments, [0, *ends], ends, strict=False)
    ]


def _scan_physical(
    dataset: lance.LanceDataset, columns: list[str], fragments: list[Any]
) -> Iterator[pa.RecordBatch]:
    """Every row of some fragments in physical order; deleted ones have a NULL `_rowid`."""
    yield from dataset.scanner(
        columns=columns,
        fragments=fragments,
        include_deleted_rows=True,
        with_row_id=True,
        scan_in_order=True,
    ).to_batches()
