"""Reading a version of a table in Spark's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from geneva.errors import (
    ColumnNotFoundError,
    GenevaError,
    TableChangedError,
    TableNotFoundError,
    TypeMismatchError,
    UserInputError,
)
from geneva.execution.runner import freeze_heap_once
from geneva.model.sql import missing_column
from geneva.model.tables import TableRef
from geneva.spark.source.options import ReadOptions
from geneva.spark.source.partitions import plan_parts
from geneva.spark.source.types import arrow_schema, spark_schema
from geneva.storage.lance.casts import Unfit, cast_batch, check_castable
from geneva.storage.lance.damage import Damaged
from geneva.storage.lance.dataset import (
    Dataset,
    first_file,
    has_path,
    has_versions,
    open_dataset,
    open_pinned,
)
from geneva.storage.lance.expressions import read_condition
from geneva.storage.lance.scans import (
    Scan,
    ScanPart,
    columns_of,
    read_sizes,
    scan_part,
    scan_schema,
)
from geneva.storage.views.definition import visible_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """One version of a table, and what is read of it."""

    ref: TableRef
    version: int
    options: ReadOptions
    scope: str
    """Tasks of one scope share an open handle."""
    first_file: str | None = None
    """What `first_file` says of the version: a table made anew has the same numbers. None: any."""

    def open(self) -> Dataset:
        """Open the version; workers keep it open for their next task."""
        try:
            dataset, found = _opened(self.ref, self.version, self.scope)
        except TableNotFoundError:
            raise (_gone(self) if has_versions(self.ref) else nothing_at(self.ref)) from None
        if self.first_file not in (None, found):
            raise _gone(self)
        return dataset

    def is_there(self) -> bool:
        """Look again whether there is the version, and of the same table."""
        try:
            found = first_file(open_dataset(self.ref, self.version))
        except TableNotFoundError:
            return False
        return self.first_file in (None, found)

    def __str__(self) -> str:
        """The table and the version, for messages."""
        return f"table {self.ref.name!r} at version {self.version}"


@lru_cache(maxsize=8)
def _opened(ref: TableRef, version: int, scope: str) -> tuple[Dataset, str]:
    dataset = open_pinned(ref, version, scope)
    return dataset, first_file(dataset)


def plan_scan(table: PinnedTable) -> tuple[Scan, pa.Schema]:
    """What is scanned, and the Arrow schema that this gives."""
    dataset, options = table.open(), table.options
    paths = options.columns
    if paths is None:
        paths = tuple(visible_schema(dataset.schema).names)
    for path in paths:
        if not has_path(dataset.schema, path):
            raise ColumnNotFoundError(missing_column(path, dataset.schema))
    columns = columns_of(dataset.schema, tuple(dict.fromkeys(paths)))
    _refuse_twins([column.name for column in columns])
    scan = Scan(
        columns,
        where=options.where,
        row_id=options.with_row_id,
        row_address=options.with_row_address,
        blob_bytes=options.blobs == "bytes",
    )
    if options.where is not None:
        scan = replace(scan, where=read_condition(dataset, options.where).exact)
    schema = scan_schema(dataset, scan)
    _refuse_twins(schema.names)
    return scan, schema


def _refuse_twins(names: Sequence[str]) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise UserInputError(
            f"Two columns would be called {twins[0]!r}: read only one of them, or the structs that "
            "they are in."
        )


def table_schema(table: PinnedTable) -> StructType:
    """The schema that Spark sees."""
    return spark_schema(plan_scan(table)[1])


@dataclass(frozen=True)
class TablePartition(InputPartition):
    """What one task reads."""

    part: ScanPart


class TableReader(DataSourceReader):
    """Reads one version of a table. It has no state: every use of a DataFrame reads the same.

    Spark 4.3 keeps what a reader was told by one query for the next one, and for the other side of
    a self-join. So filters are not pushed into it: where and columns are options.
    """

    def __init__(self, table: PinnedTable, schema: StructType) -> None:
        """Check that the columns of `schema`, which may be the user's own, can be read."""
        self._table = table
        self._schema = arrow_schema(schema)
        self._scan = self._narrowed(*plan_scan(table))

    def _narrowed(self, scan: Scan, found: pa.Schema) -> Scan:
        """The scan of just the columns of the schema."""
        for field in self._schema:
            if field.name not in found.names:
                raise ColumnNotFoundError(missing_column(field.name, found))
            try:
                check_castable(found.field(field.name).type, field.type, units=True)
            except Unfit as error:
                raise TypeMismatchError(
                    f"Column {field.name!r} of {self._table} can't be read as that: {error}."
                ) from None
        wanted = set(self._schema.names)
        columns = tuple(column for column in scan.columns if column.name in wanted)
        return replace(scan, columns=columns)

    def partitions(self) -> list[InputPartition]:
        """Whole fragments, some together, or ranges of rows of a large one."""
        return [
            TablePartition(part) for part in plan_parts(read_sizes(self._table.open(), self._scan))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part, in the types that Spark wants."""
        if not isinstance(partition, TablePartition):
            return  # Spark makes one of its own where a table has no rows
        try:
            for batch in scan_part(self._table.open(), self._scan, partition.part):
                yield cast_batch(batch, self._schema, str(self._table))
        except Damaged as error:
            raise self._unreadable(error) from None
        freeze_heap_once()

    def _unreadable(self, error: Damaged) -> Exception:
        table = self._table
        try:
            there = table.is_there()
        except (OSError, ValueError):
            there = True
        reason = table.ref.storage_options.redact(str(error))
        if there:
            return OSError(f"{table} can't be read: {reason}")
        return _gone(table)


def _gone(table: PinnedTable) -> TableChangedError:
    """The error for a version that is not there."""
    return TableChangedError(
        f"{table} is not there: it never was, or was cleaned up, or the table was dropped, since "
        "this DataFrame was made. Load the table again to read its latest version. A tag keeps a "
        "version from being cleaned up."
    )


def not_found(ref: TableRef, version: int | str | None) -> GenevaError:
    """The error for a table, a version or a tag that was not there when a frame was made."""
    if version is None or not has_versions(ref):
        return nothing_at(ref)
    if isinstance(version, int):
        return _gone(PinnedTable(ref, version, ReadOptions(), ""))
    return TableNotFoundError(f"Table {ref.name!r} has no version or tag {version!r}.")


def nothing_at(ref: TableRef) -> TableNotFoundError:
    """The error for a place where no table is."""
    hint = "" if ref.uri.endswith(".lance") else " A table's own URI mostly ends in .lance."
    return TableNotFoundError(f"There is no table {ref.name!r} at {ref.uri}.{hint}")
