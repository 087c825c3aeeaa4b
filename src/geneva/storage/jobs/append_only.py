"""A table of Geneva's own, beside the user's tables, to which rows are only ever added."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import lance
import pyarrow as pa

from geneva.model.tables import Secrets
from geneva.storage.lance.dataset import file_path
from geneva.storage.lance.session import session_of

_COMPACT_AT_FRAGMENTS = 200
_ADD_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far somebody has read: the version, and the files that it had."""

    version: int = 0
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AppendOnlyTable:
    """Opened at every use, so that all processes see the same."""

    uri: str
    schema: pa.Schema
    storage_options: Secrets

    def append(
        self, table: pa.Table, after: lance.LanceDataset | None = None
    ) -> lance.LanceDataset:
        """Add rows, in one commit; made when it is not there, and compacted now and then.

        `after` is the table as it was a while ago, which saves opening it. Returns the table as of
        this very commit: of several writers each sees the rows of those who came before it, and of
        nobody who came after.
        """
        there = self._with_all_columns(after or self.open()) or self._create()
        dataset = lance.write_dataset(table, there, mode="append")
        if len(dataset.get_fragments()) >= _COMPACT_AT_FRAGMENTS:
            self._compact(self._opened())
        return dataset

    def read(self, condition: str | None = None) -> pa.Table:
        """The rows that satisfy an SQL condition."""
        dataset = self.open()
        return self.schema.empty_table() if dataset is None else dataset.to_table(filter=condition)

    def read_new(self, cursor: Cursor) -> tuple[pa.Table, bool, Cursor]:
        """The rows since `cursor`, whether they are all there are, and where reading ended.

        A compaction puts rows that were read into new files: then all are read again.
        """
        dataset = self.open()
        version = 0 if dataset is None else int(dataset.version)
        if dataset is None or version == cursor.version:
            return self.schema.empty_table(), dataset is None, replace(cursor, version=version)
        fragments = by_file(dataset)
        now = Cursor(version, frozenset(fragments))
        if version < cursor.version or not cursor.files <= now.files:
            return dataset.to_table(), True, now
        new = [fragment for file, fragment in fragments.items() if file not in cursor.files]
        rows = dataset.scanner(fragments=new).to_table() if new else self.schema.empty_table()
        return rows, False, now

    def open(self) -> lance.LanceDataset | None:
        """The table; None when it is not there yet."""
        try:
            return self._opened()
        except ValueError as error:
            if "not found" in str(error).lower():
                return None
            raise

    def _opened(self) -> lance.LanceDataset:
        options = self.storage_options.plain()
        return lance.dataset(self.uri, storage_options=options, session=session_of(self.uri))

    def _create(self) -> lance.LanceDataset:
        """Make the table, empty. Of several who try at once one succeeds, and all go on with it.

        Not by `write_dataset`: there the second one overwrites what the first has written since.
        """
        try:
            return lance.LanceDataset.commit(
                self.uri,
                lance.LanceOperation.Overwrite(self.schema, []),
                read_version=0,
                max_retries=0,
                storage_options=self.storage_options.plain(),
            )
        except OSError:
            dataset = self.open()
            if dataset is None:
                raise
            return dataset

    def _with_all_columns(self, dataset: lance.LanceDataset | None) -> lance.LanceDataset | None:
        """The table with the columns that it lacks because an earlier release has made it."""
        for _ in range(_ADD_ATTEMPTS):
            names = dataset.schema.names if dataset is not None else self.schema.names
            missing = [field for field in self.schema if field.name not in names]
            if dataset is None or not missing:
                break
            with suppress(OSError):  # another process writes at the same moment
                dataset.add_columns(pa.schema(missing))
            dataset = self.open()
        return dataset

    @staticmethod
    def _compact(dataset: lance.LanceDataset) -> None:
        try:
            dataset.optimize.compact_files()
            dataset.cleanup_old_versions()
        except OSError:
            # Another process compacts at the same moment: one of the two is enough.
            return


def by_file(dataset: lance.LanceDataset) -> dict[str, lance.LanceFragment]:
    """The fragments of such a table in order, by the first file of each.

    A file is never written again under its name, whatever becomes of the table; ids are.
    """
    return {file_path(f.metadata.files[0]): f for f in dataset.get_fragments()}


def quoted(text: str) -> str:
    """A string as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"
