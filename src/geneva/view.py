"""A materialized view: the result of a query as a table, kept so at the cost of what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Unpack

from geneva.errors import UserInputError
from geneva.execution import declarations
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import Subject
from geneva.execution.refresh.explode import prepare_chunk_refresh
from geneva.execution.refresh.groups import GroupSubject, RefreshTarget, view_groups
from geneva.execution.refresh.prepare import RefreshRequest, prepare_refresh
from geneva.execution.refresh.work import RefreshWork
from geneva.jobs import JobFuture, JobResult
from geneva.model.tables import TableRef
from geneva.model.view_query import ViewQuery
from geneva.options import (
    JobOptions,
    RefreshArguments,
    check_count,
    read_refresh_options,
    with_options,
)
from geneva.planning.refresh import RefreshPlan
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.views.definition import ViewInfo, read_view
from geneva.storage.views.explode import CHUNKS, inner_ref
from geneva.table import Table
from geneva.udf.declare import UDF

_SYSTEM = "__"


class MaterializedView(Table):
    """A view over a table, or over another view. It reads like any table.

    Only `refresh` changes its rows. Columns may be added to it and backfilled like any other's.
    """

    def __repr__(self) -> str:
        """Show the view and what it equals."""
        query = self.definition
        return (
            f"MaterializedView({self.ref.name!r}, source={query.base_table!r}, "
            f"source_version={self.source_version})"
        )

    def _html_facts(self) -> tuple[tuple[str, Any], ...]:
        query = self.definition
        sample = (("shuffle seed", query.seed), ("limit", query.limit), ("offset", query.offset))
        source = f"table {query.base_table!r} at version {self.source_version}"
        return (("source", source), ("where", query.where), *sample)

    @property
    def definition(self) -> ViewQuery:
        """The query that the view is the result of."""
        return self._info().query

    @property
    def source_version(self) -> int:
        """The version of the source that the view was last refreshed to, or created at."""
        return self._info().base_version

    @with_options(RefreshArguments)
    def plan_refresh(
        self,
        src_version: int | None = None,
        *,
        max_rows_per_fragment: int | None = None,
        **options: Unpack[RefreshArguments],
    ) -> RefreshPlan:
        """Plan what `refresh` with the same arguments would do. Changes nothing, runs nothing."""
        self._refuse_checked_out("plan_refresh")
        return self._prepare_refresh(
            src_version, max_rows_per_fragment, read_refresh_options(options)
        ).plan

    @with_options(RefreshArguments)
    def refresh(
        self,
        src_version: int | None = None,
        *,
        max_rows_per_fragment: int | None = None,
        **options: Unpack[RefreshArguments],
    ) -> JobResult:
        """Make the view equal to its definition at a version of its source.

        Args:
            src_version: The source version, also an older one; None: the latest.
            max_rows_per_fragment: Rows of each fragment that new rows are put into.
            **options: Those of `geneva.options.RefreshArguments`.

        Returns:
            The job's outcome, which is also its id.
        """
        self._refuse_checked_out("refresh")
        asked = read_refresh_options(options)
        prepared = self._prepare_refresh(src_version, max_rows_per_fragment, asked)
        try:
            return self._connection._job(prepared, on_commit=self._follow).run()
        finally:
            # Also what a refresh that failed has finished.
            self._follow()

    @with_options(RefreshArguments)
    def refresh_async(
        self,
        src_version: int | None = None,
        *,
        max_rows_per_fragment: int | None = None,
        **options: Unpack[RefreshArguments],
    ) -> JobFuture:
        """Start a `refresh` and return at once."""
        self._refuse_checked_out("refresh")
        prepared = self._prepare_refresh(
            src_version, max_rows_per_fragment, read_refresh_options(options)
        )
        job = self._connection._job(prepared, on_commit=self._follow)
        return JobFuture(job)

    def alter_columns(self, *alterations: Mapping[str, Any]) -> None:
        """Alter columns; a view's UDF column is computed anew by the next refresh."""
        self._refuse_checked_out("alter_columns")
        own = self._query_columns()
        udfs, others = declarations.split_alterations(alterations)
        if any(str(a.get("path", "")) in own for a in others):
            self._refuse("alter_columns of a column of its query")
        for name in own & udfs.keys():
            self._alter_own(name, udfs.pop(name))
        rest = [a for a in alterations if "udf" in a and a["path"] in udfs]
        super().alter_columns(*others, *rest)
        self._table.checkout_latest()

    def _alter_own(self, name: str, change: tuple[UDF, list[str] | None]) -> None:
        source, chunker = open_dataset(self._source()), self.definition.chunker
        if chunker is None or name != chunker.name:
            declarations.alter_view_column(self.ref, source, name, change)
        if chunker is not None:
            inner = CHUNKS if name == chunker.name else name
            declarations.alter_view_column(inner_ref(self.ref), source, inner, change)

    def drop_columns(self, columns: str | Sequence[str]) -> Any:
        """Drop columns that were added to the view."""
        names = [columns] if isinstance(columns, str) else list(columns)
        if set(names) & self._query_columns() or any(n.startswith(_SYSTEM) for n in names):
            self._refuse("drop_columns of a column of its query")
        return super().drop_columns(names)

    def add(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a view's rows come from its source."""
        self._refuse("add")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a view's rows come from its source."""
        self._refuse("update")

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a view's rows come from its source."""
        self._refuse("delete")

    def merge_insert(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a view's rows come from its source."""
        self._refuse("merge_insert")

    def _refuse(self, operation: str) -> NoReturn:
        raise UserInputError(
            f"{operation} is not possible on materialized view {self.name!r}: its content is its "
            f"query over table {self.definition.base_table!r}. Change that table, then refresh."
        )

    def _query_columns(self) -> set[str]:
        """The columns that come of the query, and the name that a chunker goes by."""
        columns = {column.name for column in self.definition.columns}
        if self.definition.chunker is None:
            return columns
        lists = open_dataset(inner_ref(self.ref)).schema.field(CHUNKS).type
        return columns | {field.name for field in lists.value_type}

    def _info(self) -> ViewInfo:
        info = read_view(open_dataset(self.ref, self._version_read()).schema)
        assert info is not None
        return info

    def _source(self) -> TableRef:
        return self._connection._source_ref(self.definition)

    def _subject(self, column: str) -> Subject:
        info, chunker = self._info(), self.definition.chunker
        if column not in self._query_columns():
            return super()._subject(column)
        if chunker is not None:
            raise UserInputError(
                f"View {self.name!r} is laid out by chunker {chunker.udf_name!r}: its columns have "
                "no receipts of their own."
            )
        view = open_dataset(self.ref, self._version_read())
        group = next((g for g in view_groups(view, info) if g.name == column), None)
        if group is None:
            raise UserInputError(f"Column {column!r} of view {self.name!r} is not computed.")
        target = RefreshTarget(self.ref, self._source(), info.base_version, {})
        return GroupSubject(target, group)

    def _prepare_refresh(
        self, src_version: int | None, max_rows: int | None, options: JobOptions
    ) -> RefreshWork:
        check_count("src_version", src_version)
        check_count("max_rows_per_fragment", max_rows)
        request = RefreshRequest(src_version, max_rows, BackfillRequest(options))
        if self.definition.chunker is None:
            return RefreshWork(prepare_refresh(self.ref, self._source(), request))
        return RefreshWork(prepare_chunk_refresh(self.ref, self._source(), request))
