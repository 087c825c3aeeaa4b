"""A database: LanceDB's connection, and the jobs, Spark session and settings that go with it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geneva.config import Settings
from geneva.errors import TableNotFoundError, UserInputError
from geneva.execution.backfill.committer import MakeCommitter, TableCommitter
from geneva.execution.backfill.work import Work
from geneva.execution.declarations import warn_of_narrow_dictionaries
from geneva.execution.jobs.heartbeat import Liveness
from geneva.execution.refresh.create import create_view
from geneva.execution.runner import Runner
from geneva.jobs import Job, JobHandle, JobServices
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets, TableRef
from geneva.model.uris import (
    TableName,
    branch_uri,
    joined_uri,
    relative_uri,
    resolve,
    table_uri,
    without_file_scheme,
)
from geneva.model.view_query import ViewQuery
from geneva.query import Query
from geneva.render.text import one_line
from geneva.storage.jobs.events import JobHistory, JobRecord
from geneva.storage.jobs.failures import FailureStore
from geneva.storage.jobs.heartbeats import JobSignals, as_it_runs
from geneva.storage.lance.database import (
    check_table_name,
    drop_table,
    list_every_table,
    list_table_names,
    open_database,
    open_lancedb_table,
)
from geneva.storage.lance.dataset import has_versions, open_dataset
from geneva.storage.views.definition import is_view
from geneva.table import Table
from geneva.udf.chunker import Chunker
from geneva.udf.declare import serialize_udf, udf_digest
from geneva.view import MaterializedView

_LOG = logging.getLogger("geneva")

if TYPE_CHECKING:
    from geneva.spark.sessions import SparkSession


def connect(
    uri: str | Path,
    *,
    storage_options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
    settings: Settings | None = None,
    runner: Callable[[], Runner] | None = None,
    **lancedb_options: Any,
) -> Connection:
    """Connect to a database of Lance tables.

    Args:
        uri: A folder, or an object-store URI such as `s3://bucket/path`.
        storage_options: Keys and settings of the object store.
        spark: The Spark session to run on, classic or Connect. Without it, jobs run on an embedded
            local Spark, which is started when the first job has something to compute.
        settings: How to work; by default what the environment says.
        runner: Makes the runner that carries out tasks. For tests: Spark is the product.
        lancedb_options: Passed on to `lancedb.connect`.
    """
    secrets = Secrets(storage_options)
    path = resolve(uri)
    database = open_database(path, secrets, lancedb_options)
    return Connection(
        database, path, secrets, spark, settings or Settings.from_environment(), runner
    )


class Connection:
    """An open database. What is not defined here is LanceDB's own connection."""

    def __init__(
        self,
        database: Any,
        uri: str,
        storage_options: Secrets,
        spark: SparkSession | None,
        settings: Settings,
        runner: Callable[[], Runner] | None,
    ) -> None:
        """Use `connect`."""
        self._database, self._uri, self._storage_options = database, uri, storage_options
        self._spark, self._settings, self._runner = spark, settings, runner
        self._make_committer: MakeCommitter = TableCommitter
        self._signals = JobSignals(uri, storage_options)
        self._failures = FailureStore(uri, storage_options)
        liveness = Liveness(self._signals)
        self._history = JobHistory(uri, storage_options, liveness.is_lost, liveness.watch)

    def __getattr__(self, name: str) -> Any:
        """Hand everything else to LanceDB."""
        if name.startswith("__") or name == "_database":
            raise AttributeError(name)
        return getattr(self._database, name)

    def __repr__(self) -> str:
        """Show where the database is."""
        return f"Connection({self._uri!r})"

    def __len__(self) -> int:
        """How many tables there are."""
        return len(self.table_names())

    def __bool__(self) -> bool:
        """A connection is one, however many tables there are."""
        return True

    def __iter__(self) -> Iterator[str]:
        """The names of the tables."""
        return iter(self.table_names())

    def __contains__(self, name: object) -> bool:
        """Whether there is a table of that name."""
        return name in self.table_names()

    def __getitem__(self, name: str) -> Table:
        """Open a table: `db["t"]` is `db.open_table("t")`."""
        return self.open_table(name)

    @property
    def uri(self) -> str:
        """Where the database is."""
        return self._uri

    def table_names(self, *, namespace_path: Sequence[str] | None = None) -> list[str]:
        """The names of all tables, sorted, or of those in a namespace.

        Geneva's own tables are not among them.
        """
        return list_table_names(self._database, namespace_path or ())

    def all_table_names(self) -> list[str]:
        """The names of all tables, of their branches and of those in namespaces.

        Each is as `open_table` takes it: `table`, `table@branch`, `namespace$table`.
        """
        return [str(name) for name in list_every_table(self._database, self._storage_options)]

    def create_table(self, name: str, *args: Any, **kwargs: Any) -> Table:
        """Create a table, as LanceDB does.

        `storage_options={"new_table_enable_stable_row_ids": "true"}` gives it stable row ids.
        """
        options = kwargs.get("storage_options")
        if options and "enable_move_stable_row_ids" in options:
            # The option's older name.
            value = options["enable_move_stable_row_ids"]
            others = {k: v for k, v in options.items() if k != "enable_move_stable_row_ids"}
            kwargs["storage_options"] = {"new_table_enable_stable_row_ids": value, **others}
        return Table(self, self._database.create_table(name, *args, **kwargs))

    def open_table(
        self,
        name: str,
        *,
        version: int | None = None,
        branch: str | None = None,
        namespace_path: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Table:
        """Open a table, a branch of it or one in a namespace.

        Args:
            name: The table's name; `table@branch` and `namespace$table` say all of it in one word.
            version: The version to read, which can't be written to; None: the latest.
            branch: The branch to work on: what is done with the table stays there.
            namespace_path: The namespace that the table is in.
            **kwargs: LanceDB's own.
        """
        named = TableName.parse(name)
        asked = TableName(
            named.table,
            named.namespace if namespace_path is None else tuple(namespace_path),
            named.branch if branch is None else branch,
        )
        table = open_lancedb_table(self._database, asked, self._storage_options, kwargs)
        if table is None:
            raise TableNotFoundError(self._not_found(asked))
        opened = self._opened(table)
        if version is not None:
            opened.checkout(version)
        return opened

    def _opened(self, lancedb_table: Any) -> Table:
        kind = MaterializedView if is_view(lancedb_table.schema) else Table
        return kind(self, lancedb_table)

    def _not_found(self, name: TableName) -> str:
        without = replace(name, branch=None)
        table = None
        if name.branch is not None:
            table = open_lancedb_table(self._database, without, self._storage_options)
        if table is not None:
            branches = sorted(table.branches.list())
            return f"There is no branch {name.branch!r} of table {without!s}. Branches: {branches}."
        with suppress(Exception):  # there may be no such namespace
            known = self.table_names(namespace_path=name.namespace)
            if name.table in known:
                return (
                    f"Table {str(without)!r} in {self._uri} can't be opened: there is a folder of "
                    "that name without a version of a table in it."
                )
            return f"There is no table {str(without)!r} in {self._uri}. Tables: {known}."
        return f"There is no table {str(without)!r} in {self._uri}."

    def create_materialized_view(
        self, name: str, query: Query | Table, *, strict: bool = False
    ) -> MaterializedView:
        """Make a view of a query. Its rows are there at once, its values after `refresh()`.

        Args:
            name: The view's name.
            query: What it is to be the result of: `table.search(None).where(...)`, or a table.
            strict: Refuse a source without stable row IDs, instead of warning.
        """
        if isinstance(query, Table):
            query = query.query()
        query.check_viewable()
        check_table_name(name)
        ref = TableRef(name, table_uri(self._uri, name), self._storage_options)
        if name in self.table_names() and has_versions(ref):
            raise UserInputError(f"There is a table or view {name!r} already.")
        self._check_stable_ids(query, strict=strict)
        udfs = query.udfs()
        digests = {column: udf_digest(serialize_udf(udf)) for column, udf in udfs.items()}
        create_view(
            ref,
            open_dataset(query.source, query.source_version),
            replace(
                query.definition(digests), base_address=relative_uri(self._uri, query.source.uri)
            ),
            query.view_schema(digests),
            udfs,
        )
        warn_of_narrow_dictionaries(ref, udfs)
        view = self.open_table(name)
        assert isinstance(view, MaterializedView)
        return view

    def create_udtf_view(
        self, name: str, source: Query | Table | str, udtf: Chunker, *, strict: bool = False
    ) -> MaterializedView:
        """Make a view with several rows, or none, for each row of the source."""
        table = self.open_table(source) if isinstance(source, str) else source
        query = table.query() if isinstance(table, Table) else table
        return self.create_materialized_view(name, query.add_column(udtf), strict=strict)

    def list_materialized_views(self) -> list[str]:
        """The names of the views, sorted."""
        return [name for name in self.table_names() if self._is_view(name)]

    def _is_view(self, name: str) -> bool:
        """Whether a table is a view; one that can't be opened is none that can be used."""
        try:
            return is_view(self._database.open_table(name).schema)
        except BaseException as error:  # noqa: BLE001
            _LOG.warning("Table %r can't be opened: %s", name, one_line(error))
            return False

    def drop_table(self, name: str, **options: Any) -> None:
        """Drop a table, as LanceDB does, also while a job writes into its folder."""
        drop_table(self._database, name, **options)

    def drop_materialized_view(self, name: str) -> None:
        """Drop a view; its source stays."""
        ref = TableRef(name, table_uri(self._uri, name), self._storage_options)
        if name in self.table_names() and not has_versions(ref):
            # What a job left in the folder of a view that was dropped under it.
            drop_table(self._database, name)
            return
        view = self.open_table(name)
        if not isinstance(view, MaterializedView):
            raise UserInputError(f"{name!r} is a table, not a view: drop it with drop_table.")
        if view.ref.branch is not None:
            raise UserInputError(
                f"{name!r} is a branch of view {view.name!r}: delete it with "
                f"view.branches.delete({view.ref.branch!r})."
            )
        drop_table(self._database, name)

    def _check_stable_ids(self, query: Query, *, strict: bool) -> None:
        source = open_dataset(query.source)
        if source.has_stable_row_ids:
            return
        message = (
            f"Source table {query.source.name!r} has no stable row IDs: the view can only be "
            f"refreshed to the source's version {query.source_version}, which it is made at. "
            "Create the source with "
            "storage_options={'new_table_enable_stable_row_ids': 'true'} for incremental refresh."
        )
        if strict:
            raise UserInputError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    def _source_ref(self, query: ViewQuery) -> TableRef:
        uri = joined_uri(self._uri, query.source_address)
        branch = TableName.parse(query.base_table).branch
        return TableRef(query.base_table, uri, self._storage_options, branch)

    def list_jobs(
        self, table_name: str | None = None, status: JobStatus | str | None = None
    ) -> list[JobRecord]:
        """The jobs of this database, newest first."""
        found = self._history.list(table_name, status)
        return [as_it_runs(job, self._signals) for job in found]

    def get_job(self, job_id: str) -> JobHandle:
        """One job with its events and metrics; to wait for it, follow it or stop it."""
        job = as_it_runs(self._history.get(job_id), self._signals)
        return JobHandle.of(job, self._history, self._signals)

    def cancel_job(self, job_id: str) -> None:
        """Ask a job to stop, whichever process runs it. It commits what is finished, then ends."""
        self.get_job(job_id).cancel()

    def _table_ref(self, lancedb_table: Any) -> TableRef:
        options = {**self._storage_options, **(lancedb_table.initial_storage_options() or {})}
        branch = lancedb_table.current_branch()
        name = TableName(lancedb_table.name, tuple(lancedb_table.namespace), branch)
        uri = without_file_scheme(str(lancedb_table.uri).rstrip("/"))
        return TableRef(str(name), branch_uri(uri, branch), Secrets(options), branch)

    def _job(self, work: Work, on_commit: Callable[[], None]) -> Job:
        services = JobServices(
            history=self._history,
            signals=self._signals,
            failures=self._failures,
            settings=self._settings,
            make_runner=self._make_runner,
            make_committer=self._make_committer,
        )
        return Job(work, services, on_commit)

    def _make_runner(self) -> Runner:
        if self._runner is not None:
            return self._runner()
        from geneva.spark.embedded.settings import LocalOptions
        from geneva.spark.runner import SparkRunner
        from geneva.spark.sessions import embedded_session

        session = self._spark
        if session is None:
            options = replace(
                LocalOptions(),
                slots=self._settings.local_slots,
                class_archive=self._settings.jvm_archive,
                ui=self._settings.spark_ui,
            )
            session = embedded_session(options)
        return SparkRunner(session)
