"""A table: everything a LanceDB table can do, and computed columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import pyarrow as pa

from geneva.contexts import check_functions
from geneva.errors import ColumnNotFoundError, UserInputError
from geneva.execution import column_changes, declarations, maintenance
from geneva.execution.backfill.chain import (
    PreparedChain,
    TableColumns,
    plan_chain,
    prepare_chain,
    read_columns,
)
from geneva.execution.backfill.prepare import overtaken
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import ColumnSubject, Subject
from geneva.execution.backfill.work import BackfillWork
from geneva.execution.lifecycle import Job
from geneva.flags import check_flag
from geneva.jobs import JobFuture, JobResult
from geneva.model.sql import missing_column, quoted_name
from geneva.model.tables import ColumnDefinition, Secrets, TableRef
from geneva.options import (
    MAX_COUNT,
    BackfillArguments,
    JobOptions,
    LoadArguments,
    check_age,
    check_count,
    read_backfill_options,
    read_load_options,
    with_options,
)
from geneva.planning.backfill import BackfillPlan
from geneva.planning.estimates import Estimate
from geneva.query import Query
from geneva.render import html
from geneva.render.plain import plain
from geneva.search import Search
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.pins import (
    cleanup_versions,
    listing_tags,
    refuse_while_running,
)
from geneva.storage.columns.compaction import (
    compact,
    index_new_rows,
    merges_narrow_dictionaries,
    retried,
)
from geneva.storage.columns.definitions import (
    ComputedColumn,
    read_computed_columns,
    read_definitions,
)
from geneva.storage.jobs.failures import ErrorRecord
from geneva.storage.lance.damage import writing
from geneva.storage.lance.dataset import (
    Dataset,
    check_folder_is_there,
    has_path,
    is_dropped,
    noticing_deletion,
    open_dataset,
    planned_anew,
    read_snapshot,
    table_is_gone,
)
from geneva.storage.lance.delegation import (
    COMMITTING,
    delegated_attribute,
    is_writing,
    methods_within,
    read_within,
    writes,
)
from geneva.storage.lance.expressions import single
from geneva.storage.lance.lancedb_methods import TableMethods
from geneva.storage.lance.scores import score_of, with_schema
from geneva.storage.views.definition import (
    present_definitions,
    read_view,
    reads_source,
    visible_schema,
)
from geneva.storage.views.explode import drop_hidden_branches
from geneva.trust.policy import StoredFunction
from geneva.udf.chunker import Chunker
from geneva.udf.declare import UDF
from geneva.udf.records import UnpackedUDF
from geneva.udf.table_function import UDTF
from geneva.udf.transforms import listed_alterations, split_alterations, split_transforms

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.execution.backfill.verify import VerifyReport
    from geneva.execution.load.source import LoadSource
    from geneva.execution.preview import Preview, Trial
    from geneva.spark.sessions import DataFrame, SparkSession

__all__ = ["JobFuture", "NativeTable", "RemoteTable", "Table"]

_NOT_GIVEN: Any = object()
_OF_VIEWS = ("refresh", "refresh_async", "plan_refresh")

Function: TypeAlias = UDF | Callable[..., Any]
"""A UDF. An instance of a class that `@udf` decorates is one of that class to type checkers."""
ColumnSource: TypeAlias = UDF | tuple[UDF, Sequence[str]] | str
SeveralColumns: TypeAlias = UDF | UnpackedUDF | tuple[UDF | UnpackedUDF, Sequence[str]]


class Branches:
    """The branches of a table. What is not defined here is LanceDB's: `list`, `diff` and more."""

    def __init__(self, connection: Connection, lancedb_table: Any) -> None:
        """Use `Table.branches`."""
        self._connection, self._table = connection, lancedb_table
        self._branches = lancedb_table.branches

    def __getattr__(self, name: str) -> Any:
        """Hand everything else to LanceDB."""
        if name.startswith("__") or name == "_branches":
            raise AttributeError(name)
        return getattr(self._branches, name)

    def _writing(self, method: str, subject: object) -> AbstractContextManager[None]:
        return writing(f"branches.{method} of {subject!r} of table {self._table.name!r}")

    @writes
    def create(
        self, name: str, from_ref: str | None = None, from_version: int | None = None
    ) -> Table:
        """Make a branch of the table, or of another branch (`from_ref`), and open it."""
        return self._connection._opened(self._branches.create(name, from_ref, from_version))

    def checkout(self, name: str, version: int | None = None) -> Table:
        """Open a branch, at its latest version or at one that can't be written to."""
        branch = self._connection._opened(self._branches.checkout(name))
        if version is not None:
            branch.checkout(version)
        return branch

    @writes
    def delete(self, name: str) -> None:
        """Delete a branch, unless a job works on it, or another branch was made from it.

        What a dead job pinned is no reason not to.
        """
        ref = self._connection._table_ref(self._table)
        maintenance.check_branch_deletable(ref, name)
        maintenance.release_dead(ref, self._connection._history.close_lost)
        self._branches.delete(name)
        view = read_view(self._table.schema)
        if view is not None and view.query.chunker is not None:
            drop_hidden_branches(ref)


_WEEK = timedelta(days=7)
"""LanceDB's own age of versions that `optimize` cleans up."""
_AGES = timedelta(days=50 * 365)
"""No version is that old: LanceDB is to clean up none, as it fails at the first tag it meets."""


class Table(TableMethods):
    """A LanceDB table with computed columns.

    What is not defined here is LanceDB's own: `add`, `delete`, `update`, `merge_insert`,
    `create_index`, `count_rows` and all the rest.
    """

    def __init__(self, connection: Connection, lancedb_table: Any) -> None:
        """Wrap an open LanceDB table."""
        self._connection = connection
        self._table = lancedb_table
        self._checked_out: int | str | None = None
        self._watched: Dataset | None = None
        """The table as Lance's, to ask at little cost whether it is there; opened when asked."""
        self._seen = connection._version_seen(lancedb_table)
        """A version that this handle has read, to tell whether it is still there."""

    def _lancedb(self) -> Any:
        return self._table

    def _calling(self, method: str = "") -> AbstractContextManager[None]:
        if method in COMMITTING:
            self._check_is_there()
        if is_writing(method):
            return self._committing(method)
        return noticing_deletion(lambda: self.ref)

    def _writing(self, method: str, subject: object = None) -> AbstractContextManager[None]:
        return writing(f"{method} of table {self.name!r}")

    @contextmanager
    def _committing(self, method: str) -> Iterator[None]:
        with self._writing(method), noticing_deletion(lambda: self.ref):
            yield

    def _check_is_there(self) -> None:
        """Refuse to commit to a table that was dropped, or made anew, since this handle read it."""
        version, seen = self.version, self._seen
        if self._watched is None:
            self._watched = open_dataset(self.ref)
            dropped = self._watched.version < version
        else:
            dropped = is_dropped(self._watched, version)
        look = self._connection._version_seen
        now = look(self._table, seen.version) if seen is not None else None
        if dropped or now not in (None, seen):
            raise table_is_gone(self.ref)
        if now is None:  # cleaned up
            self._seen = look(self._table)

    if not TYPE_CHECKING:  # a misspelt name is to be an error for type checkers

        def __getattr__(self, name: str) -> Any:
            """Hand what a newer LanceDB has to LanceDB."""
            if name.startswith("__") or name == "_table":
                raise AttributeError(name)
            if name in _OF_VIEWS:
                raise AttributeError(
                    f"{self.name!r} is a table, and no view, so that it has no {name!r}: "
                    "backfill(column) computes its columns.",
                    name=name,
                    obj=self,
                )
            return delegated_attribute(self, self._table, name)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count_rows()

    def count_rows(self, filter: str | None = None) -> int:
        """Count the rows, or those that satisfy an SQL condition."""
        with self._calling():
            rows = int(self._table.count_rows(filter))
        if filter is None:  # LanceDB answers from memory, also for a table that is gone
            check_folder_is_there(self.ref)
        return rows

    def __repr__(self) -> str:
        """Show the table, its version and which columns are computed."""
        # By the handle alone: a repr costs no request, and works on a table that is gone.
        found = read_computed_columns(self._table.schema)
        computed = ", ".join(f"{c.name} <- {c.function}" for c in found)
        return f"Table({self.ref.name!r}, version={self.version}, computed=[{plain(computed)}])"

    def _repr_html_(self) -> str:
        """Show the table in a notebook: its columns, and which function computes which."""
        pairs = (("version", self.version), ("rows", f"{len(self):,}"), *self._html_facts())
        made = {c.name: c.expression for c in self.list_computed_columns()}
        columns = [(f.name, f.type, made.get(f.name)) for f in self.schema]
        return html.section(
            f"{type(self).__name__} {self.ref.name!r}",
            html.facts(pairs),
            html.grid(("column", "type", "computed by"), columns),
        )

    def _html_facts(self) -> tuple[tuple[str, Any], ...]:
        """Extra facts for the notebook representation."""
        return ()

    @property
    def name(self) -> str:
        """The table's name."""
        return str(self._table.name)

    @property
    def schema(self) -> pa.Schema:
        """The table's schema, without the columns that are Geneva's own."""
        return visible_schema(self._table.schema)

    def _visible(self) -> list[str]:
        """The names of the columns that people see."""
        return list(self.schema.names)

    def to_arrow(self, *, include_system: bool = False) -> pa.Table:
        """The rows of the table; columns that are Geneva's own only on request."""
        check_flag("include_system", include_system)
        with self._calling():
            table = self._table.to_arrow()
        return table if include_system else table.select(self._visible())

    def to_pandas(
        self, blob_mode: str = "lazy", *, include_system: bool = False, **kwargs: Any
    ) -> Any:
        """The rows of the table as a pandas data frame; `blob_mode` is LanceDB's."""
        check_flag("include_system", include_system)
        with self._calling():
            frame = self._table.to_pandas(blob_mode, **kwargs)
        return frame if include_system else frame[self._visible()]

    def head(self, n: int = 5) -> pa.Table:
        """The first rows of the table."""
        with self._calling():
            return self._table.head(n).select(self._visible())

    @property
    def version(self) -> int:
        """The version that this handle reads."""
        return int(self._table.version)

    @property
    def ref(self) -> TableRef:
        """Where the table is, or the branch that this handle is of."""
        return self._connection._table_ref(self._table)

    def get_reference(self) -> TableRef:
        """The same as `ref`, by Geneva's name."""
        return self.ref

    def get_fragments(self) -> list[Any]:
        """The fragments of the version that this handle reads, as Lance has them."""
        return list(open_dataset(self.ref, self.version).get_fragments())

    @property
    def branches(self) -> Branches:
        """The table's branches: to make one, open one, list and delete them."""
        return Branches(self._connection, self._table)

    @property
    def tags(self) -> Any:
        """The table's tags, as LanceDB has them."""
        changing = ("create", "update", "delete")
        tags = methods_within(self._table.tags, changing, lambda: self._writing("tags"))
        tags.list = partial(listing_tags, tags.list)
        return tags

    def checkout(self, version: int | str) -> None:
        """Read an older version, given by its number or tag. It can't be written to."""
        self._table.checkout(version)
        self._checked_out = version

    def checkout_latest(self) -> None:
        """Read the latest version again, and write."""
        self._table.checkout_latest()
        self._checked_out = None

    def restore(self, version: int | str | None = None) -> None:
        """Make an older version the latest, as LanceDB does: by default the checked-out one."""
        with self._calling("restore"):
            try:
                self._table.restore(version)
            except BaseException:  # LanceDB has checked the older version out, and leaves it so
                with suppress(Exception):
                    self._read_as_before()
                raise
        self._checked_out = None

    def _read_as_before(self) -> None:
        """Read the version again that was checked out, or else the latest."""
        if self._checked_out is None:
            self._table.checkout_latest()
        else:
            self._table.checkout(self._checked_out)

    def _follow(self) -> None:
        """Read what a job has committed, unless an older version was checked out meanwhile."""
        if self._checked_out is None:
            self._table.checkout_latest()

    def _refuse_checked_out(self, operation: str) -> None:
        """Refuse to write through a handle that reads an older version, as LanceDB does."""
        if self._checked_out is not None:
            raise UserInputError(
                f"{operation} is not possible on table {self.ref.name!r} while version "
                f"{self._checked_out!r} is checked out: what was written is never changed. Call "
                "checkout_latest() first, or restore() to go on from that version."
            )

    def query(self) -> Query:
        """Build a query over the table, to evaluate or to make a materialized view of."""
        return Query(self)

    def search(
        self,
        query: Any = _NOT_GIVEN,
        vector_column_name: str | None = None,
        query_type: str = "auto",
        ordering_field_name: str | None = None,
        fts_columns: str | list[str] | None = None,
    ) -> Any:
        """Search, as LanceDB does; `search(None)` builds a query like `query()`.

        `search()` is LanceDB's query of all rows, which can be made a view as well.
        """
        options = (vector_column_name, query_type, ordering_field_name, fts_columns)
        plain = options == (None, "auto", None, None)
        if query is None and plain:
            return self.query()
        found = self._table.search(None if query is _NOT_GIVEN else query, *options)
        if query is _NOT_GIVEN and plain:
            return Search(self, self._without_hidden(found))
        return with_schema(self._without_hidden(found, *score_of(found)))

    def take_offsets(self, offsets: list[int], *, with_row_id: bool = False) -> Any:
        """Take rows by their place in the table, as LanceDB does."""
        found = self._without_hidden(self._table.take_offsets(offsets))
        return found.with_row_id() if with_row_id else found

    def take_row_ids(self, row_ids: list[int], *, with_row_id: bool = False) -> Any:
        """Take rows by their row ids, as LanceDB does."""
        found = self._without_hidden(self._table.take_row_ids(row_ids))
        return found.with_row_id() if with_row_id else found

    def take_blobs(self, row_indices: Sequence[int], column: str) -> Any:
        """Open blobs of a column, as lazy files, by their rows' place in the table."""
        dataset = open_dataset(self.ref, self.version)
        if not has_path(dataset.schema, column):
            raise ColumnNotFoundError(missing_column(column, dataset.schema))
        return dataset.take_blobs(column, indices=list(row_indices))

    def limit(self, rows: int | None) -> Query:
        """Build a query of at most so many rows: `table.limit(100)`, as `query().limit(100)`."""
        return self.query().limit(rows)

    def offset(self, rows: int | None) -> Query:
        """Build a query without the first so many rows: `table.offset(50).limit(100)`."""
        return self.query().offset(rows)

    def to_polars(self, batch_size: int | None = None) -> Any:
        """The rows of the table as a lazy polars frame."""
        frame = self._table.to_polars(batch_size)
        visible = self._visible()
        # Not by the names of those that stay: `*` and `^a$` are patterns to polars.
        return frame.drop([name for name in self._table.schema.names if name not in visible])

    def to_spark(
        self,
        spark: SparkSession | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        version: int | str | None = None,
        with_row_id: bool = False,
        with_row_address: bool = False,
        blobs: str = "descriptors",
    ) -> DataFrame:
        """One version of the table as a Spark data frame, whatever happens to the table later.

        Spark reads all of the columns named here, whichever a query needs, and filters rows itself
        after reading them: what is given here is what saves work.

        Args:
            spark: The session, classic or Connect; by default the one that jobs run on.
            columns: The columns to read, as paths; None: all but Geneva's own.
            where: Only the rows that satisfy an SQL condition, as in `query().where(...)`.
            version: The version, by number or tag; None: the one that this handle reads.
            with_row_id: Add the column `_rowid`.
            with_row_address: Add the column `_rowaddr`.
            blobs: `"descriptors"`: where the bytes are, as in `to_arrow`; or `"bytes"`.
        """
        from geneva.spark.source.frames import read_frame
        from geneva.spark.source.options import ReadOptions

        check_flag("with_row_id", with_row_id)
        check_flag("with_row_address", with_row_address)
        number = self.version
        if isinstance(version, bool) or not isinstance(version, int | str | None):
            raise UserInputError(f"version must be a number or a tag, not {version!r}.")
        if version is not None:
            number = int(open_dataset(self.ref, version).version)
        if isinstance(columns, str):
            raise UserInputError(f"columns must be a list of names, not {columns!r}.")
        options = ReadOptions(
            columns=None if columns is None else tuple(columns),
            where=where,
            version=number,
            with_row_id=with_row_id,
            with_row_address=with_row_address,
            blobs=blobs,
        )
        return read_frame(self._connection._session(spark), self.ref, options)

    def _without_hidden(self, found: Any, *more: str) -> Any:
        """A LanceDB query, of all columns, without those that are Geneva's own."""
        visible = self._visible()
        if len(visible) < len(self._table.schema):
            names = [*visible, *more]
            # In a list, the name `*` is all columns to Lance.
            found = found.select({n: quoted_name(n) for n in names} if "*" in names else names)
        return read_within(found, self._calling)

    @writes
    def compact_files(self, *args: Any, **kwargs: Any) -> Any:
        """Merge small fragments. Computed values move along; nothing is computed again."""
        self._refuse_checked_out("compact_files")
        metrics = compact(self.ref, *args, **kwargs)
        self._table.checkout_latest()
        return metrics

    @writes
    def optimize(
        self,
        *,
        cleanup_older_than: timedelta | None = None,
        delete_unverified: bool = False,
        retrain: bool = False,
    ) -> Any:
        """Compact, index new rows and clean old versions up, as LanceDB does.

        Versions that have a tag, and so those that running jobs read, stay. By default versions
        older than seven days are cleaned up, and what jobs that died have left behind.
        """
        check_flag("delete_unverified", delete_unverified)
        check_flag("retrain", retrain)
        if cleanup_older_than is not None:
            check_age("cleanup_older_than", cleanup_older_than)
        self._refuse_checked_out("optimize")
        if delete_unverified:
            refuse_while_running(self.ref, self._connection._history.close_lost)
        done = None
        if merges_narrow_dictionaries(self.ref):
            compact(self.ref)
            index_new_rows(self.ref, retrain=retrain)
            self._table.checkout_latest()
        else:
            optimize = partial(self._optimize_latest, retrain=retrain)
            done = retried(self.ref, lambda: listing_tags(optimize))
        age = _WEEK if cleanup_older_than is None else cleanup_older_than  # none is an age, too
        self._cleanup_versions(age, delete_unverified=delete_unverified)
        self._connection._remove_dead(self.ref.name, [self.ref])
        return done

    def _optimize_latest(self, *, retrain: bool) -> Any:
        self._table.checkout_latest()  # what others have committed since is no conflict
        return self._table.optimize(cleanup_older_than=_AGES, retrain=retrain)

    @writes
    def cleanup_old_versions(
        self,
        older_than: timedelta | None = None,
        *,
        delete_unverified: bool = False,
        **options: Any,
    ) -> Any:
        """Delete old versions, as LanceDB does, but for those that have a tag: jobs read them."""
        check_flag("delete_unverified", delete_unverified)
        if older_than is not None:
            check_age("older_than", older_than)
        return self._cleanup_versions(older_than, delete_unverified=delete_unverified, **options)

    def _cleanup_versions(self, older_than: timedelta | None, **options: Any) -> Any:
        is_running = self._connection._history.close_lost
        return cleanup_versions(self.ref, is_running, older_than, **options)

    @writes
    def cleanup_checkpoints(self, older_than: timedelta = timedelta(hours=1)) -> CleanupReport:
        """Remove checkpoints that no backfill can use again, and what dead jobs have left.

        Backfills do this for their own column and table as they end, and so does `optimize`.
        Files younger than `older_than` that no dead job is known to have left stay: a running job
        may be about to commit them.
        """
        check_age("older_than", older_than)
        removed = maintenance.cleanup_checkpoints(
            self.ref, self._connection._history.close_lost, older_than
        )
        return removed + self._connection._remove_dead(self.ref.name, [self.ref], older_than)

    def computed_columns(self) -> dict[str, ColumnDefinition]:
        """The computed columns and what is known of their UDFs. Runs no user code.

        Inputs are named as they are now, also where they were renamed since the declaration.
        """
        if not read_definitions(self._table.schema):
            return {}
        return present_definitions(open_dataset(self.ref, self.version))

    def list_computed_columns(self) -> list[ComputedColumn]:
        """All computed columns: by UDF, for `backfill`, and LanceDB's own, for `refresh_column`."""
        return read_computed_columns(self._table.schema, self.computed_columns())

    @writes
    def add_columns(
        self,
        transforms: Mapping[str, ColumnSource] | SeveralColumns | Any = None,
        *,
        computed: Mapping[str, str] | None = None,
    ) -> Any:
        """Add columns: by UDF, `(udf, [input columns])`, or an SQL expression.

        A UDF that returns `geneva.Columns[...]` is given as it is, without a name: each field is a
        column, and `geneva.UnpackedUDF(udf, prefix=...)` gives them other names. Of such columns
        that are there already, just the missing ones are added. A list may hold several such UDFs,
        and mappings.

        A UDF column costs a metadata commit; its values are NULL until `backfill`. All UDF columns
        of one call are one commit. Everything else, `computed=` too, is LanceDB's.
        """
        self._refuse_checked_out("add_columns")
        udfs, others = split_transforms(transforms)
        if udfs and others is not None and computed:
            raise UserInputError(
                f"LanceDB takes no expressions together with computed: add {sorted(others)} in a "
                "call of their own. Nothing was added."
            )
        if udfs:
            check_functions(new.udf for new in udfs)
            declarations.add_udf_columns(self.ref, udfs, self._connection._trust.declare)
            self._table.checkout_latest()
        if not udfs or others is not None or computed is not None:
            with self._calling("add_columns"):
                return self._table.add_columns(others, computed=computed)
        return None

    @writes
    def alter_columns(self, *alterations: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        """Alter columns: `{"path": "c", "udf": new_udf}` gives a computed column another UDF.

        It gives that to all columns that one call fills together.

        The next backfill computes it anew. With `"keep": "computed"` it keeps what is there, and
        runs the new UDF only for rows that failed, are missing, or whose inputs changed: a fix for
        a few bad rows costs these rows. Other alterations (rename, nullable) are LanceDB's.
        """
        self._refuse_checked_out("alter_columns")
        listed = listed_alterations(alterations)
        udfs, others = split_alterations(listed)
        column_changes.refuse_altering_hidden(self.ref, listed)
        column_changes.check_alterable(self.ref, others)
        if udfs:
            check_functions(new.udf for new in udfs.values())
            declarations.alter_udf_columns(self.ref, udfs, self._connection._trust.declare)
            self._table.checkout_latest()
        if not others:
            return None
        altered = column_changes.alter_plain_columns(
            self.ref, others, lambda: self._table.alter_columns(*others)
        )
        self._table.checkout_latest()
        return altered

    @writes
    def drop_columns(self, columns: str | Sequence[str]) -> Any:
        """Drop columns. Only metadata changes.

        Of columns that one call fills together, those that are left are filled as before.
        """
        self._refuse_checked_out("drop_columns")
        names = [columns] if isinstance(columns, str) else list(columns)
        column_changes.check_droppable(self.ref, names)
        return self._table.drop_columns([*names, *column_changes.receipts_of(self.ref, names)])

    @with_options(BackfillArguments)
    def plan_backfill(
        self,
        col_name: str,
        *,
        udf: Function | tuple[Function, Sequence[str]] | None = None,
        **options: Unpack[BackfillArguments],
    ) -> BackfillPlan:
        """Say what `backfill` with the same arguments would do. Changes nothing, runs nothing."""
        asked = read_backfill_options(options)
        if asked.read_version is None:
            asked = replace(asked, read_version=self._version_read())
        plan = self._prepare(col_name, udf, asked, planning_only=True).plan
        return self._estimated(plan)

    def _planner(self, *, retry_failed: bool = False) -> Callable[[str], BackfillPlan]:
        """Plan computed columns as `plan_backfill` does: on one version, which is read once."""
        version = self._version_read()
        request = BackfillRequest(JobOptions(read_version=version, retry_failed=retry_failed))

        @cache
        def read() -> TableColumns:
            ref = self.ref
            return read_columns(ref, open_dataset(ref, version))

        def plan(column: str) -> PreparedChain:
            columns = read()
            schema, fields = columns.snapshot.schema, columns.snapshot.fields
            definition = declarations.own_definition(columns.ref, schema, fields, column)
            try:
                return plan_chain(columns, definition, request)
            except BaseException:
                read.cache_clear()  # whoever plans again reads anew
                raise

        def left_out(made: PreparedChain) -> Sequence[object]:
            found = _left_out(made) if version is None else ()
            if found:
                read.cache_clear()
            return found

        def planned(column: str) -> BackfillPlan:
            made = planned_anew(lambda: [self.ref], partial(plan, column), left_out)
            return self._estimated(made.plan)

        return planned

    def _estimated(self, plan: BackfillPlan) -> BackfillPlan:
        """The plan with the time that it will take, where its function was measured before."""
        if not plan.rows_to_run:
            return plan
        measured = self._connection._measured_before(plan)
        if measured is None:
            return plan
        slots = self._connection._slots()
        return replace(plan, estimate=Estimate(measured, plan.rows_to_run, slots))

    def preview(
        self,
        udf: Function | Chunker | UDTF | tuple[Function | Chunker, Sequence[str]] | str,
        n: int = 5,
        *,
        where: str | None = None,
    ) -> Preview:
        """Try a function on `n` rows, in this process: no Spark, no job, nothing is written.

        Shows the values, what rows took, what failed and why, and how long the whole table would
        take on this session's slots. Plans of this connection show that estimate from then on.

        Args:
            udf: A UDF or chunker, `(udf, [input columns])`, a table function, or the name of a
                computed column.
            n: How many rows; of a table function, how many partitions: those of the first rows,
                with all rows that they have.
            where: SQL condition on the rows to try. A table function sees no others, and the
                estimate is for these.
        """
        from geneva.execution.preview import partition_trial, run_preview

        check_count("n", n)
        if not n:
            raise UserInputError("n must be a whole number of at least 1, not None.")
        ref, connection = self.ref, self._connection
        dataset = open_dataset(ref, self._version_read())
        query = self.query() if where is None else self.query().where(where)
        if isinstance(udf, UDTF):
            trial = partition_trial(udf, query.table_function(udf)[1], ref, dataset, n)
        else:
            trial = self._rows_to_try(dataset, query.limit(n), udf)
        shown = run_preview(
            trial,
            ref.name,
            slots=connection._slots(),
            env=connection._variables,
            hidden=connection._hidden,
        )
        if shown.estimate is not None:
            connection._measured[ref.name, trial.udf.version] = shown.estimate.measured
        return shown

    def _rows_to_try(self, dataset: Dataset, query: Query, udf: Any) -> Trial:
        """A function, and the rows of a query as it is called with them."""
        from geneva.execution.preview import Trial

        permit = self._connection._trust.permit
        function, paths = declarations.function_to_try(self.ref, dataset, udf, permit)
        rows = query.select({f"c{i}": path for i, path in enumerate(paths)}).to_arrow()
        columns = [single(column) for column in rows.combine_chunks().columns]
        inputs = pa.RecordBatch.from_arrays(columns, list(paths))
        return Trial(function, inputs, total=len(self))

    @with_options(BackfillArguments)
    def backfill(
        self,
        col_name: str,
        *,
        udf: Function | tuple[Function, Sequence[str]] | None = None,
        **options: Unpack[BackfillArguments],
    ) -> JobResult:
        """Compute the column's values and wait until they are in the table.

        Args:
            col_name: The column to compute; with it, all that one call fills together.
            udf: Another UDF than the column's own, for this run.
            **options: Those of `geneva.options.BackfillArguments`.

        Returns:
            The job's outcome, which is also its id.
        """
        return self._job(col_name, udf, read_backfill_options(options)).run()

    @with_options(BackfillArguments)
    def backfill_async(
        self,
        col_name: str,
        *,
        udf: Function | tuple[Function, Sequence[str]] | None = None,
        **options: Unpack[BackfillArguments],
    ) -> JobFuture:
        """Start a `backfill` and return at once. Wrong arguments raise here, not in the future."""
        job = self._job(col_name, udf, read_backfill_options(options))
        return self._connection._future(job)

    @with_options(LoadArguments)
    def load_columns(
        self,
        source: Any,
        pk: str,
        columns: str | Sequence[str],
        *,
        source_format: str | None = None,
        on_missing: str = "carry",
        checkpoint_interval_seconds: float | None = 60,
        storage_options: Mapping[str, str] | None = None,
        **options: Unpack[LoadArguments],
    ) -> JobResult:
        """Load columns from elsewhere, joined by key, and wait until they are in the table.

        New data files are written for these columns alone. A load that is run again with the same
        source does what is left: nothing, or the rows that came since, or what was not finished.

        Args:
            source: A file or folder (path or URI), a list of files, a Spark data frame, or what
                hands over Arrow data: a `pyarrow.Table`, a `RecordBatchReader`.
            pk: The column to join by, of the same name on both sides. Each of its values is once in
                the source; in the table it may be there any number of times.
            columns: The columns to load; those that the table doesn't have are added.
            source_format: `"parquet"`, `"lance"` or `"ipc"`; by default by the suffix, or what is
                in the folder.
            on_missing: What to do with rows whose key is not in the source: `"carry"` keeps the
                value that they have (NULL in a new column), `"null"` makes it NULL, and `"error"`
                loads nothing at all (UnmatchedKeyError).
            checkpoint_interval_seconds: Seconds of a task's work between checkpoints.
            storage_options: Keys and settings of the store that the source is in; by default those
                of the connection.
            **options: Those of `geneva.options.LoadArguments`.

        Returns:
            The job's outcome, which is also its id.
        """
        asked = read_load_options(options, checkpoint_interval_seconds)
        opened = self._load_source(source, source_format, storage_options)
        result = self._load_job(opened, pk, columns, on_missing, asked).run()
        self._follow()  # also where columns were added, and no row was there to fill
        return result

    @with_options(LoadArguments)
    def load_columns_async(
        self,
        source: Any,
        pk: str,
        columns: str | Sequence[str],
        *,
        source_format: str | None = None,
        on_missing: str = "carry",
        checkpoint_interval_seconds: float | None = 60,
        storage_options: Mapping[str, str] | None = None,
        **options: Unpack[LoadArguments],
    ) -> JobFuture:
        """Start a `load_columns` and return at once. Wrong arguments raise here."""
        asked = read_load_options(options, checkpoint_interval_seconds)
        opened = self._load_source(source, source_format, storage_options)
        return self._connection._future(self._load_job(opened, pk, columns, on_missing, asked))

    def _load_source(
        self, source: Any, source_format: str | None, storage_options: Mapping[str, str] | None
    ) -> LoadSource:
        from geneva.execution.load.source import open_source, refuse_format

        if type(source).__module__.startswith("pyspark.sql"):
            from geneva.spark.loading import FrameSource

            refuse_format(source, source_format)
            return FrameSource.of(source)
        own = self.ref.storage_options
        given = own if storage_options is None else Secrets(storage_options)
        return open_source(source, source_format, given)

    def _load_job(
        self,
        source: LoadSource,
        pk: str,
        columns: str | Sequence[str],
        on_missing: str,
        options: JobOptions,
    ) -> Job:
        from geneva.execution.load.prepare import read_request
        from geneva.execution.load.work import plan_load

        request = read_request(source, pk, columns, on_missing, options)
        self._refuse_checked_out("load_columns")
        self._connection._history.open_ahead()
        work = plan_load(self.ref, request, self._connection._make_runner)
        job_id = request.options.job_id
        return self._connection._job(work, on_commit=self._follow, job_id=job_id)

    def verify(
        self,
        col_name: str,
        *,
        sample: int | float | None = None,
        run: bool = False,
        seed: int = 0,
    ) -> VerifyReport:
        """Look at the rows of a computed column, and say which are not what they should be.

        Plans trust files and transactions where these prove a value right. This trusts neither: it
        compares the receipt of every row with its inputs and its value. It changes nothing.

        Args:
            col_name: The computed column.
            sample: Look at so many rows (`1` is one), or at such a share of them (a float up to
                `1.0`, which is all); None: at all.
            run: Also call the function, here, and compare what it returns with what is stored.
                Values that people wrote, and those that were kept from an earlier function, are
                right whatever it returns; `kept_values` of the report says for how many of them
                that is another value.
            seed: Of the sample.
        """
        from geneva.execution.backfill.verify import verify

        check_flag("run", run)
        if sample is not None and not 0 < sample <= MAX_COUNT:
            raise UserInputError(f"sample must be a number of rows or a share, not {sample!r}.")
        subject, version = self._subject(col_name), self._version_read()
        return verify(
            subject,
            version,
            column=col_name,
            sample=sample,
            run=run,
            seed=seed,
            permit=self._connection._trust.permit,
            env=self._connection._variables,
        )

    def _version_read(self) -> int | None:
        """The version that was checked out; None: the latest, whatever this handle has seen."""
        return None if self._checked_out is None else self.version

    def _subject(self, column: str) -> Subject:
        dataset = open_dataset(self.ref, self._version_read())
        definition = declarations.definition_for(self.ref, dataset, column, None, store=False)
        return ColumnSubject(self.ref, definition)

    def stored_functions(self) -> list[StoredFunction]:
        """The functions that compute columns, as far as is known without loading any of them."""
        found = []
        for subject in self._subjects():
            dataset = open_dataset(subject.ref, None)
            computation = subject.bind(dataset, read_snapshot(dataset, subject.ref))
            found.append(self._connection._trust.look(subject.ref, computation))
        return found

    def _subjects(self) -> list[Subject]:
        """What a backfill or refresh computes with a function."""
        dataset = open_dataset(self.ref)
        own = {
            definition.computation_id: definition
            for definition in reversed(read_definitions(dataset.schema).values())
            if not reads_source(definition.arrow_field)
        }
        return [ColumnSubject(self.ref, definition) for definition in reversed(own.values())]

    @writes
    def sign_functions(self, columns: Sequence[str] | None = None) -> list[str]:
        """Sign the functions of columns, as they are, with this connection's key; return which.

        For those that were declared without one, and after a column that they read was renamed.
        """
        self._refuse_checked_out("sign_functions")
        return [
            name
            for ref in self._refs()
            for name in declarations.declare_again(ref, columns, self._connection._trust.resign)
        ]

    def _refs(self) -> list[TableRef]:
        """The tables that hold its functions."""
        return [self.ref]

    def get_errors(
        self,
        job_id: str | None = None,
        column_name: str | None = None,
        error_type: str | None = None,
    ) -> list[ErrorRecord]:
        """The rows of this table on which a UDF failed, oldest first; the latest job's last.

        A row that failed is here for every job that tried it, also when it was computed since.
        `error_type` is the name of an exception's class.
        """
        return self._connection._failures.list(self.ref.name, job_id, column_name, error_type)

    def get_failed_row_addresses(
        self, job_id: str | None = None, column_name: str | None = None
    ) -> list[int]:
        """The addresses of those rows (fragment << 32 | offset), ascending, each once."""
        return sorted({error.row_address for error in self.get_errors(job_id, column_name)})

    def _job(self, column: str, udf: Any, options: JobOptions) -> Job:
        self._refuse_checked_out("backfill")
        self._connection._history.open_ahead()
        with self._writing("backfill"):  # another function is declared before the job begins
            chain = self._prepare(column, udf, options, planning_only=False)
        if chain.own.plan.version > self.version:  # also where there is nothing to compute
            self._follow()
        work = BackfillWork(chain)
        return self._connection._job(work, on_commit=self._follow, job_id=options.job_id)

    def _prepare(
        self,
        column: str,
        udf: Any,
        options: JobOptions,
        *,
        planning_only: bool,
    ) -> PreparedChain:
        if not isinstance(column, str):
            raise UserInputError(
                f"Name one column, not {column!r}. Columns that one call fills are all filled by a "
                "backfill of any of them."
            )
        plan = partial(self._planned, column, udf, options, planning_only=planning_only)
        if options.read_version is not None:
            return plan()
        return planned_anew(lambda: [self.ref], plan, _left_out)

    def _planned(
        self, column: str, udf: Any, options: JobOptions, *, planning_only: bool
    ) -> PreparedChain:
        ref = self.ref
        dataset = open_dataset(ref, options.read_version)
        if options.read_version is not None:
            declarations.check_column_was_there(ref, dataset, column)
        definition = declarations.definition_for(
            ref,
            dataset,
            column,
            udf,
            store=not planning_only,
            retry_failed=options.retry_failed,
            declare=self._connection._trust.declare,
        )
        if udf is not None and options.read_version is None and not planning_only:
            dataset = open_dataset(ref)  # the function may have been declared just now
        make_runner = None if planning_only else self._connection._make_runner
        request = BackfillRequest(options)
        return prepare_chain(ref, dataset, definition, request, make_runner=make_runner)


def _left_out(made: PreparedChain) -> Sequence[object]:
    """The fragments that plans leave out, if others may have cleaned them up."""
    return [fragment for step in made.steps for fragment in overtaken(step)]


NativeTable = Table
"""The name that programs for Geneva on Ray know it by."""


class RemoteTable(Table):
    """A table of LanceDB's service, by Geneva's name. No table is one here."""
