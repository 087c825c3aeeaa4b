"""The data source itself: what Spark calls to read a table, and to write one."""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource

from geneva.errors import GenevaError, TableNotFoundError, UserInputError
from geneva.model.tables import Secrets, TableRef
from geneva.spark.source.options import (
    asked_version,
    check_names,
    read_options,
    table_ref,
    write_options,
)
from geneva.spark.source.reader import (
    PinnedTable,
    TableReader,
    not_found,
    table_schema,
)
from geneva.spark.source.writer import RowWriter, TableStreamWriter, TableWriter, plan_write
from geneva.storage.lance.damage import damage_reason
from geneva.storage.lance.dataset import Dataset, first_file, open_dataset

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TableSource(DataSource):
    """A Lance table. An instance reads one version: by default the latest one when it was made.

    Spark shows the options of a source in plans and pages. The keys of an object store are part of
    the class instead, which `source_class` makes: Spark passes it on as a pickle and never prints
    it.
    """

    format_name: ClassVar[str] = "geneva"
    storage_options: ClassVar[Secrets] = Secrets()
    folder: ClassVar[str] = ""
    """Where relative paths begin: where the source was registered, not where a worker runs."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Find the version. It is kept with the instance, which Spark pickles from here."""
        super().__init__(options)
        check_names(options)
        self._found: tuple[int, str] | None = None
        with suppress(TableNotFoundError):  # it may be about to be written
            dataset = _opened(self._ref(), asked_version(options))
            self._found = int(dataset.version), first_file(dataset)
        self._scope = uuid.uuid4().hex

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return cls.format_name

    def schema(self) -> StructType:
        """The columns that people see, or those that were asked for."""
        return table_schema(self._pinned())

    def reader(self, schema: StructType) -> TableReader:
        """Make a reader of the columns of `schema`."""
        return TableReader(self._pinned(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TableWriter:  # noqa: FBT001  Spark's
        """Make a writer of a data frame."""
        writer = self._row_writer(schema, overwrite=overwrite)
        if writer.options.app_id is not None and writer.options.batch_id is None:
            raise UserInputError("app_id needs a batch_id: which of its batches is this?")
        return TableWriter(writer)

    def streamWriter(
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001  Spark's
    ) -> TableStreamWriter:
        """Make a writer of a stream, which appends."""
        if overwrite:
            raise UserInputError("A stream is appended to a table: its output mode is append.")
        return TableStreamWriter(self._row_writer(schema, overwrite=False))

    def _row_writer(self, schema: StructType, *, overwrite: bool) -> RowWriter:
        ref, options = self._ref(), write_options(self.options)
        return RowWriter(ref, plan_write(ref, schema, options, overwrite=overwrite), options)

    def _ref(self) -> TableRef:
        return table_ref(self.options, self.storage_options, self.folder)

    def _pinned(self) -> PinnedTable:
        options, ref = read_options(self.options), self._ref()
        if self._found is None:
            raise not_found(ref, options.version)
        version, file = self._found
        table = PinnedTable(ref, version, options, self._scope, file)
        table.open()
        return table


def _opened(ref: TableRef, version: int | str | None) -> Dataset:
    try:
        return open_dataset(ref, version)
    except GenevaError:
        raise
    except ValueError as error:
        sign = "Invalid user input: "
        if not str(error).startswith(sign):
            raise
        reason = ref.storage_options.redact(damage_reason(error)).removeprefix(sign)
        raise UserInputError(f"{ref.uri!r} can't be opened: {reason}.") from error


def source_class(name: str, storage_options: Secrets, folder: str) -> type[TableSource]:
    """A data source of a name, with the keys that it opens tables with.

    The class is in no module, so that it is pickled with what it has, and not as a reference.
    """
    own = {"format_name": name, "storage_options": storage_options, "folder": folder}
    return type("GenevaTableSource", (TableSource,), own)
