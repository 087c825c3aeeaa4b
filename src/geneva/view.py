"""A materialized view: the result of a query as a table, kept so at the cost of what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import pyarrow as pa

from geneva.contexts import check_functions
from geneva.errors import TypeMismatchError, UserInputError
from geneva.execution import column_changes, declarations, maintenance
from geneva.execution.backfill.chain import PreparedChain
from geneva.execution.backfill.request import BackfillRequest
from geneva.execution.backfill.subjects import Subject
from geneva.execution.refresh.circle import refuse_circle
from geneva.execution.refresh.explode import prepare_chunk_refresh
from geneva.execution.refresh.groups import (
    GroupSubject,
    RefreshTarget,
    UdfColumns,
    refreshed_columns,
    view_groups,
)
from geneva.execution.refresh.partitions import prepare_partition_refresh
from geneva.execution.refresh.prepare import (
    OpenTables,
    RefreshRequest,
    open_latest,
    prepare_refresh,
)
from geneva.execution.refresh.work import RefreshWork
from geneva.flags import check_flag
from geneva.jobs import JobFuture, JobResult
from geneva.model.addresses import fragment_of
from geneva.model.partitions import KEY_PREFIX
from geneva.model.tables import TableRef
from geneva.model.view_query import ColumnKind, ViewColumn, ViewQuery
from geneva.options import (
    JobOptions,
    RefreshArguments,
    check_age,
    check_count,
    read_refresh_options,
    with_options,
)
from geneva.planning.refresh import RefreshPlan
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.pins import cleanup_versions
from geneva.storage.columns.compaction import compact
from geneva.storage.jobs.failures import ErrorRecord, ErrorRecords
from geneva.storage.lance.dataset import open_dataset, planned_anew
from geneva.storage.lance.delegation import writes
from geneva.storage.views.definition import ViewInfo, read_view
from geneva.storage.views.explode import (
    CHUNKS,
    SourcePlace,
    chunk_schema,
    inner_ref,
    query_columns,
    source_places,
)
from geneva.storage.views.partitions import PARTITIONS_ADDRESS, partitions_ref, rows_ref
from geneva.table import Function, Table
from geneva.udf.chunker import Chunker, RowsFunction
from geneva.udf.declare import UDF
from geneva.udf.table_function import UDTF
from geneva.udf.transforms import NewFunction, listed_alterations, split_alterations

if TYPE_CHECKING:
    from geneva.execution.preview import Preview

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
    def table(self) -> MaterializedView:
        """The view as a table, which it is; LanceDB's own views have theirs here."""
        return self

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
        asked = read_refresh_options(options)
        return self._prepare_refresh(
            src_version, max_rows_per_fragment, asked, planning_only=True
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
            job = self._connection._job(prepared, on_commit=self._follow, job_id=asked.job_id)
            result = job.run()
        except BaseException:
            # Show what a refresh that failed has finished, unless the view was dropped under it.
            with suppress(RuntimeError):
                self._follow()
            raise
        self._follow()
        return result

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
        asked = read_refresh_options(options)
        prepared = self._prepare_refresh(src_version, max_rows_per_fragment, asked)
        job = self._connection._job(prepared, on_commit=self._follow, job_id=asked.job_id)
        return self._connection._future(job)

    @writes
    def alter_columns(self, *alterations: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        """Alter columns; a view's UDF column is computed anew by the next refresh.

        `{"path": name, "udf": chunker}` gives a chunked view another chunker, where `name` is that
        of the present one (`view.definition.chunker.name`). The next refresh runs it for every
        source row, and replaces just those rows of the view that come out differently. So is a
        table function replaced by another one, of the same partitions and inputs.
        """
        self._refuse_checked_out("alter_columns")
        own = self._query_columns()
        listed = listed_alterations(alterations)
        of_rows = [a for a in listed if isinstance(_function(a), RowsFunction)]
        of_columns = [a for a in listed if not isinstance(_function(a), RowsFunction)]
        makers, _ = split_alterations([self._of_lists(a) for a in of_rows])
        udfs, others = split_alterations(of_columns)
        column_changes.refuse_altering_hidden(self.ref, of_columns)
        if any(str(a.get("path", "")).split(".")[0] in own for a in others):
            self._refuse("alter_columns of a column of its query")
        self._refuse_altering_yielded(udfs)
        column_changes.check_alterable(self.ref, others)
        check_functions(new.udf for new in (*makers.values(), *udfs.values()))
        of_query = {name: udfs.pop(name) for name in sorted(own & udfs.keys())}
        declarations.alter_view_columns(
            self.ref, self._altered(makers, of_query), udfs, self._connection._trust.declare
        )
        altered = None
        if others:
            altered = column_changes.alter_plain_columns(
                self.ref, others, lambda: self._table.alter_columns(*others)
            )
        self._table.checkout_latest()
        return altered

    def _refuse_altering_yielded(self, paths: Iterable[str]) -> None:
        """Refuse to give a function of its own to what a chunker or table function makes."""
        current, visible = self.definition.chunker, self._visible()
        if current is None:
            return
        word, yielded = _word(current), self._chunk_schema().names
        for path in paths:
            is_maker = path == current.name and path not in visible
            if is_maker or path in yielded:
                what = f"is the {word}" if is_maker else f"comes of the {word}"
                raise UserInputError(
                    f"{path!r} {what} of view {self.name!r}: give it another {word}, with "
                    f'{{"path": {current.name!r}, "udf": another {word}}}.'
                )

    def _of_lists(self, alteration: Mapping[str, Any]) -> Mapping[str, Any]:
        """An alteration that gives another chunker, as one of the UDF that returns its lists."""
        path, made, current = alteration.get("path"), _function(alteration), self.definition.chunker
        assert isinstance(made, Chunker | UDTF)
        what = "table function" if isinstance(made, UDTF) else "chunker"
        if current is None or path != current.name or _word(current) != what:
            instead = f" Its {_word(current)} is {current.name!r}." if current is not None else ""
            raise UserInputError(
                f"{path!r} is not the {what} of view {self.name!r}: only a {what} can be given "
                f"another {what}.{instead}"
            )
        if isinstance(made, UDTF):
            self._check_same_partitions(made)
        made.check_bound()
        if made.output_schema.remove_metadata() != self._chunk_schema():
            raise TypeMismatchError(
                f"{made.name!r} yields {_columns(made.output_schema)}, and the {what} of view "
                f"{self.name!r} yields {_columns(self._chunk_schema())}. The columns must stay the "
                "same; for others, create another view."
            )
        given = alteration["udf"]
        return {**alteration, "udf": made.udf if given is made else (made.udf, given[1])}

    def _check_same_partitions(self, made: UDTF) -> None:
        """Refuse a table function that reads something else than the present one does."""
        keyed = self._rows_query().keyed
        assert keyed is not None
        keys = tuple(name.removeprefix(KEY_PREFIX) for name in keyed.keys)
        same = keys == made.partition_by and made.input_columns in (None, list(keyed.values))
        if not same or made.partition_by_indexed_column != self.definition.partition_index:
            raise UserInputError(
                f"The table function of view {self.name!r} reads {list(keyed.values)}, partitioned "
                f"by {list(keys) or self.definition.partition_index}. Another one must have the "
                "same inputs and partitions; for others, create another view."
            )

    def _rows_query(self) -> ViewQuery:
        """The query of the hidden view of rows, of a view of a table function."""
        info = read_view(open_dataset(rows_ref(self.ref)).schema)
        assert info is not None
        return info.query

    def _chunk_schema(self) -> pa.Schema:
        """The columns that the chunker yields."""
        return chunk_schema(self.ref)

    def _altered(
        self, makers: Mapping[str, NewFunction], of_query: Mapping[str, NewFunction]
    ) -> list[declarations.OfQuery]:
        """Which functions change in the view and in its hidden one, which has the query's too."""
        hidden = dict(zip([CHUNKS], makers.values(), strict=False))  # a view has one, if any
        if self.definition.chunker is not None:
            hidden |= of_query
        altered = []
        if hidden:
            is_udtf = self.definition.udtf is not None
            source = partitions_ref(self.ref) if is_udtf else self._source()
            altered.append(declarations.OfQuery(inner_ref(self.ref), source, hidden))
        if of_query:
            altered.append(declarations.OfQuery(self.ref, self._source(), of_query))
        return altered

    def preview(
        self,
        udf: Function | Chunker | UDTF | tuple[Function | Chunker, Sequence[str]] | str,
        n: int = 5,
        *,
        where: str | None = None,
    ) -> Preview:
        """Try a function on rows of the view, as `Table.preview` does.

        Functions of the view's query are tried on its source.
        """
        if isinstance(udf, str) and udf in self._query_columns():
            raise UserInputError(
                f"Column {udf!r} of view {self.name!r} is one of its query: try its function on "
                f"the source, table {self.definition.base_table!r}, with preview(function)."
            )
        return super().preview(udf, n, where=where)

    def get_errors(
        self,
        job_id: str | None = None,
        column_name: str | None = None,
        error_type: str | None = None,
    ) -> list[ErrorRecord]:
        """The rows on which a UDF failed, oldest first; the latest job's last.

        A chunker, or a UDF column of a chunked view's query, fails on a row of the view's source:
        address and id are those of that row there, where it still is (else the id is None). A table
        function fails on a partition, which the preview of the inputs names.
        """
        found = super().get_errors(job_id, column_name, error_type)
        chunker = self.definition.chunker
        if chunker is None:
            return found
        hidden = CHUNKS if column_name == chunker.name else column_name
        inner = inner_ref(self.ref)
        records = self._connection._failures.list(inner.name, job_id, hidden, error_type)
        places: list[SourcePlace | None] = [None] * len(records)
        if self.definition.udtf is None:
            ids = [record.row_id for record in records]
            places = source_places(inner, open_dataset(self._source()), ids)
        made = [
            replace(_of_source(record, place), table_name=self.name, table_uri=self.ref.uri)
            for record, place in zip(records, places, strict=True)
        ]
        named = {CHUNKS: chunker.name}
        made = [replace(r, column_name=named.get(r.column_name, r.column_name)) for r in made]
        return ErrorRecords(sorted([*found, *made], key=lambda record: record.at))

    @writes
    def drop_columns(self, columns: str | Sequence[str]) -> Any:
        """Drop columns that were added to the view."""
        names = [columns] if isinstance(columns, str) else list(columns)
        if {name.split(".")[0] for name in names} & self._query_columns() or any(
            n.startswith(_SYSTEM) for n in names
        ):
            self._refuse("drop_columns of a column of its query")
        return super().drop_columns(names)

    @writes
    def cleanup_checkpoints(self, older_than: timedelta = timedelta(hours=1)) -> CleanupReport:
        """Remove checkpoints that nothing can use again, and staged files of dead jobs.

        What a refresh that was cut off has computed stays, for the next one to take over.
        """
        check_age("older_than", older_than)
        removed = sum(
            (
                maintenance.cleanup_checkpoints(
                    ref, self._connection._history.close_lost, older_than, refreshed_columns(ref)
                )
                for ref in self._refs()
            ),
            CleanupReport(0, 0, 0),
        )
        return removed + self._connection._remove_dead(self.ref.name, self._refs(), older_than)

    def _cleanup_versions(self, older_than: timedelta | None, **options: Any) -> Any:
        """Clean old versions up, of the hidden tables as well: they grow with every refresh."""
        for ref in self._hidden_refs():
            cleanup_versions(ref, self._connection._history.close_lost, older_than, **options)
        return super()._cleanup_versions(older_than, **options)

    @writes
    def optimize(
        self,
        *,
        cleanup_older_than: timedelta | None = None,
        delete_unverified: bool = False,
        retrain: bool = False,
    ) -> Any:
        """Compact, index new rows and clean old versions up, of hidden tables as well.

        See `Table.optimize`.
        """
        check_flag("delete_unverified", delete_unverified)
        check_flag("retrain", retrain)
        if cleanup_older_than is not None:
            check_age("cleanup_older_than", cleanup_older_than)
        self._refuse_checked_out("optimize")
        for ref in self._refs()[1:]:
            compact(ref)
        return super().optimize(
            cleanup_older_than=cleanup_older_than,
            delete_unverified=delete_unverified,
            retrain=retrain,
        )

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

    def _prepare(
        self,
        column: str,
        udf: UDF | tuple[UDF, Sequence[str]] | None,
        options: JobOptions,
        *,
        planning_only: bool,
    ) -> PreparedChain:
        if column in self._query_columns():
            raise UserInputError(
                f"Column {column!r} of view {self.name!r} is one of its query over table "
                f"{self.definition.base_table!r}: refresh() fills it, and backfill can't. To give "
                "a UDF column another UDF use alter_columns, then refresh; to compute something "
                "else, add a column to the view with add_columns."
            )
        return super()._prepare(column, udf, options, planning_only=planning_only)

    def _refuse(self, operation: str) -> NoReturn:
        raise UserInputError(
            f"{operation} is not possible on materialized view {self.name!r}: its content is its "
            f"query over table {self.definition.base_table!r}. Change that table, then refresh."
        )

    def _query_columns(self) -> set[str]:
        """The columns that come of the query."""
        return query_columns(self.ref, self.definition)

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
                f"View {self.name!r} is laid out by {_word(chunker)} {chunker.udf_name!r}: its "
                "columns have no receipts of their own."
            )
        view = open_dataset(self.ref, self._version_read())
        groups = [g for g in view_groups(view, info) if isinstance(g, UdfColumns)]
        group = next((g for g in groups if column in g.columns_filled), None)
        if group is None:
            raise UserInputError(f"Column {column!r} of view {self.name!r} is not computed.")
        address = info.query.source_address
        target = RefreshTarget(self.ref, self._source(), info.base_version, {}, address)
        return GroupSubject(target, group)

    def _subjects(self) -> list[Subject]:
        subjects = super()._subjects()
        for ref in self._refs():
            view = open_dataset(ref)
            info = read_view(view.schema)
            if info is None or info.query.chunker is not None:
                continue
            address = info.query.source_address
            source, version = self._source(), info.base_version
            if info.query.base_address == PARTITIONS_ADDRESS:
                source = partitions_ref(self.ref)
                version = int(open_dataset(source).version)
            target = RefreshTarget(ref, source, version, {}, address)
            groups = (g for g in view_groups(view, info) if isinstance(g, UdfColumns))
            subjects.extend(GroupSubject(target, group) for group in groups)
        return subjects

    def _refs(self) -> list[TableRef]:
        partitions = partitions_ref(self.ref)  # has no function, and no checkpoint
        return [self.ref, *(ref for ref in self._hidden_refs() if ref != partitions)]

    def _hidden_refs(self) -> list[TableRef]:
        """The tables inside of the view's folder that its rows are made from."""
        if self.definition.udtf is not None:
            return [inner_ref(self.ref), rows_ref(self.ref), partitions_ref(self.ref)]
        return [] if self.definition.chunker is None else [inner_ref(self.ref)]

    def _prepare_refresh(
        self,
        src_version: int | None,
        max_rows: int | None,
        options: JobOptions,
        *,
        planning_only: bool = False,
    ) -> RefreshWork:
        check_count("src_version", src_version)
        check_count("max_rows_per_fragment", max_rows)
        if not planning_only:
            self._connection._history.open_ahead()
        request = RefreshRequest(src_version, max_rows, BackfillRequest(options))
        plan = partial(self._planned_refresh, request, planning_only=planning_only)
        # Which table the source is takes a request: it is asked for after an error only.
        return planned_anew(lambda: [self.ref, self._source()], plan, lambda work: work.overtaken)

    def _planned_refresh(self, request: RefreshRequest, *, planning_only: bool) -> RefreshWork:
        view = open_dataset(self.ref)
        info = read_view(view.schema)
        assert info is not None
        query = info.query
        source = self._connection._source_ref(query)
        tables = OpenTables(view, open_latest(source))
        refuse_circle(self.ref, source, tables.source, self._connection._source_of)
        if query.udtf is not None:
            return RefreshWork(
                prepare_partition_refresh(
                    self.ref, source, request, view, planning_only=planning_only
                )
            )
        if query.chunker is not None:
            return RefreshWork(prepare_chunk_refresh(self.ref, source, request, view))
        return RefreshWork(prepare_refresh(self.ref, source, request, tables=tables))


def _function(alteration: Mapping[str, Any]) -> Any:
    """The function that an alteration gives, with inputs or without."""
    given = alteration.get("udf")
    return given[0] if isinstance(given, tuple | list) and len(given) == 2 else given


def _word(column: ViewColumn) -> str:
    """What makes the rows of a view, in words."""
    return "table function" if column.kind is ColumnKind.UDTF else "chunker"


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _of_source(record: ErrorRecord, place: SourcePlace | None) -> ErrorRecord:
    """A failure on a row of a hidden view, as one on the row of the source that it is of."""
    if place is None:
        return replace(record, row_id=None)
    address = place.row_address
    return replace(
        record, row_id=place.row_id, row_address=address, fragment_id=fragment_of(address)
    )
