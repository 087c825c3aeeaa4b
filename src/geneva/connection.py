"""A database: LanceDB's connection, and the jobs, Spark session and settings that go with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack, overload

from geneva.cluster import GenevaCluster
from geneva.compatibility import (
    AUTO_REFRESH,
    CONNECT_WORDS,
    hybrid_method,
    warn_compatibility,
    warn_of_variables,
    warn_user,
)
from geneva.config import Settings
from geneva.contexts import Context, ExitMode, check_functions, modules_of
from geneva.database_refresh import plan_database, refresh_database
from geneva.errors import JobNotFoundError, TableNotFoundError, UnknownOptionError, UserInputError
from geneva.execution.backfill.committer import MakeCommitter, TableCommitter
from geneva.execution.backfill.work import Work
from geneva.execution.declarations import refuse_blob_inside, warn_of_narrow_dictionaries
from geneva.execution.jobs.dead_jobs import remove_dead, remove_limits
from geneva.execution.jobs.heartbeat import Liveness
from geneva.execution.lifecycle import Job, JobServices
from geneva.execution.refresh.create import create_partitioned_view, create_view
from geneva.execution.runner import Runner
from geneva.flags import check_flag
from geneva.jobs import JobFuture, JobHandle, JobResult
from geneva.manifest import GenevaManifest
from geneva.model.jobs import JobConfig, JobMetrics, JobStatus, whole_id
from geneva.model.sql import quoted_name
from geneva.model.tables import Secrets, TableRef
from geneva.model.uris import (
    TableName,
    branch_uri,
    is_relative,
    joined_uri,
    local_path,
    relative_uri,
    resolve,
    table_uri,
    without_file_scheme,
)
from geneva.model.view_query import ViewQuery
from geneva.options import WorkArguments
from geneva.planning.backfill import BackfillPlan
from geneva.planning.database import DatabasePlan
from geneva.planning.estimates import Measured
from geneva.planning.refresh import RefreshPlan
from geneva.query import Query
from geneva.render.text import did_you_mean, listed, one_line
from geneva.search import Search
from geneva.secret_values import checked_variables, names_a_key
from geneva.storage.checkpoints.cleanup import CleanupReport
from geneva.storage.checkpoints.dead_jobs import A_DAY
from geneva.storage.columns.copies import copy_table, how_to_get_stable_ids
from geneva.storage.jobs.events import plain_id
from geneva.storage.jobs.failures import FailureStore
from geneva.storage.jobs.heartbeats import JobSignals, as_it_runs, newest_metrics
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.named_records import NamedRecords
from geneva.storage.jobs.output import OutputStore
from geneva.storage.jobs.records import JobRecord, JobRecords
from geneva.storage.jobs.system_tables import SYSTEM_NAMESPACE, system_table
from geneva.storage.lance.damage import writing
from geneva.storage.lance.database import (
    check_table_name,
    drop_table,
    is_source_of_lancedb,
    list_every_table,
    list_table_names,
    list_table_places,
    new_table_options,
    open_database,
    open_lancedb_table,
    opening,
)
from geneva.storage.lance.dataset import VersionSeen, has_versions, open_dataset, version_seen
from geneva.storage.lance.delegation import delegated_attribute, is_writing, writes
from geneva.storage.lance.folder import NoFolder, is_missing_folder, open_folder
from geneva.storage.lance.lancedb_methods import ConnectionMethods
from geneva.storage.views.definition import (
    ViewKind,
    ViewName,
    is_view,
    view_kind,
    visible_schema,
)
from geneva.system_tables import SystemTable
from geneva.table import Table
from geneva.trust.policy import Policy, Trust
from geneva.udf.chunker import Chunker
from geneva.udf.declare import serialize_udf, udf_digest
from geneva.udf.table_function import UDTF
from geneva.view import MaterializedView

_LOG = logging.getLogger("geneva")
_ENVIRONMENT_BEFORE = dict(os.environ)
"""What Spark's workers have from this process: it is imported before Spark is started for it."""

if TYPE_CHECKING:
    from geneva.spark.runner import SparkRunner
    from geneva.spark.sessions import SparkSession


def connect(
    uri: str | Path | None = None,
    *,
    region: str | None = None,
    api_key: str | None = None,
    host_override: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    checkpoint: Any = None,
    system_namespace: Sequence[str] | None = None,
    namespace_client_impl: str | None = None,
    namespace_client_properties: Mapping[str, str] | None = None,
    namespace_client_pushdown_operations: Sequence[str] | None = None,
    upload_dir: str | None = None,
    initialize_upload_dir: bool = True,
    spark: SparkSession | None = None,
    settings: Settings | None = None,
    runner: Callable[[], Runner] | None = None,
    env: Mapping[str, str] | None = None,
    trust: Policy | None = None,
    signing_key: str | None = None,
    trusted_keys: str | None = None,
    **lancedb_options: Any,
) -> Connection:
    """Connect to a database of Lance tables.

    Args:
        uri: A folder, or an object-store URI such as `s3://bucket/path`.
        region: Of LanceDB's service, as `api_key` and `host_override`: nothing here uses it.
        api_key: See `region`.
        host_override: See `region`.
        storage_options: Keys and settings of the object store.
        checkpoint: Checkpoints are inside each table here; taken and not used.
        system_namespace: Geneva's own tables are in `_geneva` here; taken and not used.
        namespace_client_impl: "dir" is a folder, whose path is the property `root`.
        namespace_client_properties: What LanceDB hands to the namespace's client.
        namespace_client_pushdown_operations: What a namespace's server is to do; a folder has none.
        upload_dir: Functions are stored inside each table here; taken and not used.
        initialize_upload_dir: See `upload_dir`.
        spark: The Spark session to run on, classic or Connect. Without it, jobs run on an embedded
            local Spark, which is started when the first job has something to compute.
        settings: How to work; by default what the environment says.
        runner: Makes the runner that carries out tasks. For tests: Spark is the product.
        env: Environment variables for the functions of all jobs, such as keys of services. They go
            to the workers, and nowhere else. On this machine, workers have what this process has
            in its environment when a job starts; on a cluster they have only these.
        trust: Which stored functions may run: "all"; "signed": those that a trusted key has signed,
            that were accepted on this machine, or that this process declared; or a function that is
            given a `geneva.trust.policy.StoredFunction` and returns True. By default what the
            settings say ("all", unless GENEVA_TRUST is set). See docs/security.md.
        signing_key: The key to sign functions with that are declared: its line, or its file.
        trusted_keys: More keys whose functions may run: their lines, or a file of them.
        lancedb_options: Passed on to `lancedb.connect`. `namespace_impl` and `namespace_properties`
            are older names of `namespace_client_impl` and `namespace_client_properties`.
    """
    for word, value in (("checkpoint", checkpoint), ("system_namespace", system_namespace)):
        if value is not None:
            warn_compatibility(f"connect({word}=...)", CONNECT_WORDS[word])
    warn_of_variables(os.environ)
    namespace_client_impl = lancedb_options.pop("namespace_impl", namespace_client_impl)
    namespace_client_properties = lancedb_options.pop(
        "namespace_properties", namespace_client_properties
    )
    _check_surroundings(spark, settings, runner)
    secrets = Secrets(storage_options)
    path = resolve(_place(uri, namespace_client_impl, namespace_client_properties))
    if namespace_client_properties is not None and namespace_client_impl is None:
        lancedb_options["namespace_client_properties"] = dict(namespace_client_properties)
    known = settings or Settings.from_environment()
    trusting = Trust.read(
        known.trust if trust is None else trust,
        signing_key or known.signing_key,
        trusted_keys or known.trusted_keys,
        known.accepted_file,
    )
    with opening(path, secrets):
        connection = Connection(
            partial(open_database, path, secrets, lancedb_options),
            path,
            secrets,
            spark,
            known,
            runner,
            Secrets(checked_variables(env)),
            replace(trusting, database=path),
        )
    connection.namespace_client_impl = namespace_client_impl
    connection.namespace_client_properties = dict(namespace_client_properties or {})
    connection.namespace_client_pushdown_operations = list(
        namespace_client_pushdown_operations or []
    )
    if lancedb_options or not (Path(path).is_dir() or is_missing_folder(path)):
        # What is wrong with a place is said here. A folder that is there can be opened later, and
        # one that isn't is made by what writes to it: the path may be mistyped.
        _ = connection._of_lancedb
    return connection


def _check_surroundings(spark: Any, settings: Any, runner: Any) -> None:
    """Refuse what no job could run with, before one is to."""
    if runner is not None and not callable(runner):
        kind = type(runner).__name__
        raise UserInputError(
            f"runner is called to make a runner for each job, and {kind} can't be called: give the "
            f"class, runner={kind}, or a function that makes one."
        )
    if spark is not None and not hasattr(spark, "createDataFrame"):
        raise UserInputError(
            f"spark must be a SparkSession, not {type(spark).__name__}: "
            "SparkSession.builder.master(...).getOrCreate()."
        )
    if not isinstance(settings, Settings | None):
        raise UserInputError(
            f"settings must be geneva.config.Settings(...), not {type(settings).__name__}."
        )


def _place(
    uri: str | Path | None, namespace: str | None, properties: Mapping[str, str] | None
) -> str | Path:
    """Where a database is, whichever way it was said."""
    if str(uri or "").startswith("db://"):
        raise UserInputError(
            f"{uri} is a database of LanceDB's service (Cloud or Enterprise), which runs jobs by "
            "itself. Geneva on Spark works on the tables of a folder or an object store: give "
            "their place, such as 's3://bucket/path'."
        )
    if str(uri or "").startswith("memory://"):
        raise UserInputError(
            f"{uri} is inside of this process, where no worker can read it: give a folder, such as "
            "tempfile.mkdtemp()."
        )
    if uri is not None:
        return uri
    root = (properties or {}).get("root")
    if namespace != "dir" or root is None:
        raise UserInputError(
            "connect needs a place: connect('folder'), connect('s3://bucket/path'), or "
            "connect(namespace_client_impl='dir', namespace_client_properties={'root': ...}). "
            f"A namespace of kind {namespace!r} is a service: give the place of its tables."
        )
    return root


def _id_of(job: object) -> str:
    """The id of a job, or of what has one."""
    return plain_id(getattr(job, "job_id", job))


def _for_users(job: JobRecord) -> JobRecord:
    """A record whose numbers and settings read in both of their shapes."""
    config: Any = JobConfig(job.config)
    return replace(job, config=config, metrics=JobMetrics(job.metrics))


def _set_primary_key(table: Any, columns: str | list[str]) -> None:
    """Note a table's primary key, where LanceDB can: not for columns that may be NULL."""
    names = [columns] if isinstance(columns, str) else list(columns)
    nullable = [name for name in names if table.schema.field(name).nullable]
    if nullable:
        warn_compatibility(
            f"create_table(primary_key={columns!r})",
            f"LanceDB notes no primary key of columns that may be NULL ({nullable}); give a schema "
            "with pa.field(..., nullable=False)",
        )
        return
    table.set_unenforced_primary_key(names)


class Connection(ConnectionMethods):
    """An open database. What is not defined here is LanceDB's own connection."""

    namespace_client_impl: str | None = None
    """How the namespace was named to `connect`: "dir" for a folder; None: it was not."""
    namespace_client_properties: Mapping[str, str] = MappingProxyType({})
    namespace_client_pushdown_operations: Sequence[str] = ()

    def __init__(
        self,
        open_database: Callable[[], Any],
        uri: str,
        storage_options: Secrets,
        spark: SparkSession | None,
        settings: Settings,
        runner: Callable[[], Runner] | None,
        env: Secrets,
        trust: Trust,
    ) -> None:
        """Use `connect`."""
        self._env, self._trust = env, trust
        self._open_database, self._uri, self._storage_options = open_database, uri, storage_options
        self._spark, self._settings, self._runner = spark, settings, runner
        self._make_committer: MakeCommitter = TableCommitter
        self._contexts: list[Context] = []
        self._clusters = NamedRecords(uri, "clusters", storage_options)
        self._manifests = NamedRecords(uri, "manifests", storage_options)
        self._signals = JobSignals(uri, storage_options)
        self._measured: dict[tuple[str, str], Measured] = {}
        """What functions took in previews, by table and version."""
        self._failures = FailureStore(uri, storage_options)
        self._output = OutputStore(uri, storage_options)
        liveness = Liveness(self._signals)
        self._history = JobHistory(
            uri,
            storage_options,
            liveness.is_lost,
            liveness.watch,
            self._signals.request_cancel,
            partial(newest_metrics, signals=self._signals),
        )

    @cached_property
    def _of_lancedb(self) -> Any:
        """LanceDB's own connection, opened when it is needed: LanceDB is slow to import."""
        return self._open_database()

    @property
    def _database(self) -> Any:
        """The same; of a folder that isn't there, something that can be looked at."""
        if "_of_lancedb" not in self.__dict__ and is_missing_folder(self._uri):
            return NoFolder(self._uri, lambda: self._of_lancedb)
        return self._of_lancedb

    def _lancedb(self) -> Any:
        return self._database

    def _calling(self, method: str = "") -> AbstractContextManager[None]:
        return self._writing(method, self._uri) if is_writing(method) else nullcontext()

    def _writing(self, method: str, subject: object) -> AbstractContextManager[None]:
        return writing(method if subject is None else f"{method} of {subject!r}")

    def _for_looking(self) -> Connection:
        """This connection, on which Lance alone opens the tables of a folder, where it can.

        For a command that looks and leaves: its tables don't follow what LanceDB's handle does.
        """
        self._open_database = partial(open_folder, self._uri, self._open_database)
        return self

    if not TYPE_CHECKING:  # a misspelt name is to be an error for type checkers

        def __getattr__(self, name: str) -> Any:
            """Hand what a newer LanceDB has to LanceDB."""
            if name.startswith("__") or name in ("_database", "_of_lancedb"):
                raise AttributeError(name)
            return delegated_attribute(self, self._database, name)

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

    def table_names(
        self,
        page_token: str | None = None,
        limit: int | None = None,
        *,
        namespace_path: Sequence[str] | None = None,
    ) -> list[str]:
        """The names of all tables, sorted, or of those in a namespace.

        Geneva's own tables are not among them. `page_token` is the last name of the page before.
        """
        names = list_table_names(self._database, namespace_path or ())
        return [name for name in names if page_token is None or name > page_token][:limit]

    def all_table_names(self) -> list[str]:
        """The names of all tables, of their branches and of those in namespaces.

        Each is as `open_table` takes it: `table`, `table@branch`, `namespace$table`.
        """
        return [str(name) for name in list_every_table(self._database, self._storage_options)]

    @writes
    def create_table(
        self,
        name: str,
        data: Any = None,
        schema: Any = None,
        mode: str = "create",
        exist_ok: bool = False,  # noqa: FBT001, FBT002  (LanceDB's own signature)
        on_bad_vectors: str = "error",
        fill_value: float = 0.0,
        embedding_functions: list[Any] | None = None,
        *,
        namespace_path: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        data_storage_version: str | None = None,
        enable_v2_manifest_paths: bool | None = None,
        primary_key: str | list[str] | None = None,
    ) -> Table:
        """Create a table, as LanceDB does, with stable row ids, which views of it need.

        `storage_options={"new_table_enable_stable_row_ids": "false"}`, here or in `connect`, makes
        one without. A table that is overwritten keeps what it has. `primary_key` is what
        LanceDB's `set_unenforced_primary_key` takes.
        """
        made = self._database.create_table(
            name,
            data,
            schema,
            mode,
            exist_ok,
            on_bad_vectors,
            fill_value,
            embedding_functions,
            namespace_path=list(namespace_path) if namespace_path else None,
            storage_options=new_table_options(
                self._storage_options, storage_options, namespace_path
            ),
            data_storage_version=data_storage_version,
            enable_v2_manifest_paths=enable_v2_manifest_paths,
        )
        if primary_key is not None:
            _set_primary_key(made, primary_key)
        return self._opened(made)

    @writes
    def clone_table(
        self,
        target_table_name: str,
        source_uri: str,
        *,
        target_namespace_path: list[str] | None = None,
        source_version: int | None = None,
        source_tag: str | None = None,
        is_shallow: bool = True,
    ) -> Table:
        """Make a table of another one's files, as LanceDB does."""
        made = self._database.clone_table(
            target_table_name,
            source_uri,
            target_namespace_path=target_namespace_path,
            source_version=source_version,
            source_tag=source_tag,
            is_shallow=is_shallow,
        )
        return self._opened(made)

    @writes
    def copy_table(self, source: str, target: str) -> Table:
        """Copy the latest version of a table into a new one, which has stable row ids.

        Computed columns come along with their functions and receipts, so that nothing is computed
        anew. Older versions, tags, branches and indexes do not.
        """
        table = self.open_table(source)
        if isinstance(table, MaterializedView):
            raise UserInputError(
                f"{source!r} is a view, which has stable row ids. For another one like it use "
                "create_materialized_view."
            )
        copy_table(table.ref, self._new_ref(target))
        return self.open_table(target)

    def open_table(
        self,
        name: str,
        *,
        namespace_path: Sequence[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
        index_cache_size: int | None = None,
        branch: str | None = None,
        version: int | None = None,
        namespace: Sequence[str] | None = None,
    ) -> Table:
        """Open a table, a branch of it or one in a namespace.

        Args:
            name: The table's name; `table@branch` and `namespace$table` say all of it in one word.
            namespace_path: The namespace that the table is in.
            storage_options: Keys and settings of the object store, besides the connection's.
            index_cache_size: LanceDB's own.
            branch: The branch to work on: what is done with the table stays there.
            version: The version to read, which can't be written to; None: the latest.
            namespace: Geneva's word for `namespace_path`.
        """
        namespace_path = namespace if namespace_path is None else namespace_path
        named = TableName.parse(name)
        asked = TableName(
            named.table,
            named.namespace if namespace_path is None else tuple(namespace_path),
            named.branch if branch is None else branch,
        )
        if asked.namespace == (SYSTEM_NAMESPACE,):
            found = system_table(asked.table, self._history.list(), self._failures.list())
            return SystemTable(self, found)
        own = None if storage_options is None else dict(Secrets(storage_options))
        options = {"storage_options": own, "index_cache_size": index_cache_size}
        given = {name: value for name, value in options.items() if value is not None}
        table = open_lancedb_table(self._database, asked, self._storage_options, given)
        if table is None:
            raise TableNotFoundError(self._not_found(asked))
        opened = self._opened(table)
        if version is not None:
            opened.checkout(version)
        return opened

    def get_table(self, name: str, **options: Any) -> Table:
        """Open a table; another word for `open_table`."""
        return self.open_table(name, **options)

    def _opened(self, lancedb_table: Any) -> Table:
        kind = MaterializedView if is_view(lancedb_table.schema) else Table
        return kind(self, lancedb_table)

    def _not_found(self, name: TableName) -> str:
        without = replace(name, branch=None)
        if is_missing_folder(self._uri):
            return f"There is no table {str(without)!r}: there is no folder {self._uri!r}."
        table = None
        if name.branch is not None:
            table = open_lancedb_table(self._database, without, self._storage_options)
        if table is not None:
            branches = sorted(table.branches.list())
            return (
                f"There is no branch {name.branch!r} of table {without!s}."
                f"{did_you_mean(name.branch or '', branches)} Branches: {listed(branches)}."
            )
        with suppress(Exception):  # there may be no such namespace
            known = self.table_names(namespace_path=name.namespace)
            if name.table in known:
                return (
                    f"Table {str(without)!r} in {self._uri} can't be opened: there is a folder of "
                    "that name without a version of a table in it."
                )
            return (
                f"There is no table {str(without)!r} in {self._uri}."
                f"{did_you_mean(name.table, known)} Tables: {listed(known)}."
            )
        return f"There is no table {str(without)!r} in {self._uri}."

    @writes
    def create_materialized_view(
        self,
        name: str,
        source: Any = None,
        *,
        select: Any = None,
        where: str | None = None,
        limit: int | None = None,
        with_no_data: bool | None = None,
        auto_refresh: bool = False,
        strict: bool = False,
        query: Query | Table | None = None,
    ) -> Any:
        """Make a view of a query, or one of LanceDB's own views of a table's name.

        A view of a query, or of a table, is Geneva's: a `MaterializedView`. Its rows are there at
        once, its values after `refresh()`. A view of a name (or of `lancedb.vector_dedup`) is
        LanceDB's: SQL only, filled at once.

        Args:
            name: The view's name.
            source: What it is to be the result of: `table.search(None).where(...)`, or a table; for
                LanceDB's, the name of a table.
            select: The columns of LanceDB's view; those of ours are in the query.
            where: The condition of LanceDB's view.
            limit: Rows of LanceDB's view, at most.
            with_no_data: Don't fill it yet; by default True for ours, False for LanceDB's.
            auto_refresh: For services that refresh views by themselves: there is none here.
            strict: Refuse a source without stable row IDs, instead of warning.
            query: Another word for `source`.
        """
        source = query if source is None else source
        check_flag("strict", strict)
        if with_no_data is not None:
            check_flag("with_no_data", with_no_data)
        if check_flag("auto_refresh", auto_refresh):
            warn_compatibility("create_materialized_view(auto_refresh=True)", AUTO_REFRESH)
        own = {"select": select, "where": where, "limit": limit}
        if isinstance(source, Table | Search):
            source = source.query()
        if not isinstance(source, Query):
            if not is_source_of_lancedb(source):
                raise UserInputError(
                    f"create_materialized_view({name!r}) needs a query (table.search(None)), a "
                    f"table, or the name of one, not {type(source).__name__}."
                )
            if strict:
                raise UserInputError("strict is for views of a query; LanceDB's are always strict.")
            own["select"] = self._columns_for_lancedb(source, select)
            return self._database.create_materialized_view(
                name, source, with_no_data=bool(with_no_data), **own
            )
        for option in (option for option, value in own.items() if value is not None):
            raise UserInputError(
                f"{option}= is for views of a table's name, which are LanceDB's. Say it in the "
                f"query: table.search(None).{option}(...)."
            )
        view = self._create_view(name, source, strict=strict)
        if with_no_data is False:
            view.refresh()
        return view

    @writes
    def create_materialized_view_async(
        self,
        name: str,
        source: Any,
        *,
        select: Any = None,
        where: str | None = None,
        limit: int | None = None,
        with_no_data: bool = False,
    ) -> Any:
        """Start to make one of LanceDB's own views of a table's name, and return its job."""
        select = self._columns_for_lancedb(source, select)
        own = {"select": select, "where": where, "limit": limit, "with_no_data": with_no_data}
        return self._database.create_materialized_view_async(name, source, **own)

    def _columns_for_lancedb(self, source: Any, select: Any = None) -> Any:
        """What one of LanceDB's own views selects: all but the columns that are Geneva's own."""
        if select is not None or not isinstance(source, str):
            return select
        table = open_lancedb_table(self._database, TableName(source), self._storage_options)
        if table is None:
            return None  # LanceDB says so
        visible = visible_schema(table.schema).names
        return None if len(visible) == len(table.schema) else {n: quoted_name(n) for n in visible}

    def _create_view(self, name: str, query: Query, *, strict: bool) -> MaterializedView:
        query.check_viewable()
        ref = self._new_ref(name)
        self._check_stable_ids(query, strict=strict)
        udfs = query.udfs()
        check_functions(udfs.values())
        digests = {column: udf_digest(serialize_udf(udf)) for column, udf in udfs.items()}
        create_view(
            ref,
            open_dataset(query.source, query.source_version),
            replace(
                query.definition(digests), base_address=relative_uri(self._uri, query.source.uri)
            ),
            query.view_schema(digests),
            udfs,
            self._trust.declare,
        )
        kinds = {c.name: c.udf.data_type for c in query.columns if c.udf is not None}
        warn_of_narrow_dictionaries(ref, kinds)
        return self._open_view(name)

    @writes
    def create_view(self, name: str, query: Any, *, namespace_path: list[str] | None = None) -> Any:
        """LanceDB's own: a named SQL query, which the database plans on every read."""
        if getattr(query, "is_geneva_query", False):
            raise UserInputError(
                f"create_view({name!r}, ...) takes SQL text, and is LanceDB's own. A view of a "
                f"query is create_materialized_view({name!r}, query)."
            )
        return self._database.create_view(name, query, namespace_path=namespace_path)

    @writes
    def create_udtf_view(
        self,
        name: str,
        source: Query | Search | Table | str,
        udtf: Chunker | UDTF | Callable[..., Any],
        *,
        strict: bool = False,
    ) -> MaterializedView:
        """Make a view of the rows that a function makes of a query's; `refresh()` fills it.

        Args:
            name: The view's name.
            source: The query, or a table, or its name.
            udtf: A chunker, which makes several rows, or none, of each row of the source; or a
                table function, which makes rows of the rows of each partition.
            strict: Refuse a source without stable row IDs, instead of warning.
        """
        check_flag("strict", strict)
        table = self.open_table(source) if isinstance(source, str) else source
        query = table.query() if isinstance(table, Table | Search) else table
        if isinstance(udtf, UDTF):
            return self._create_partitioned_view(name, query, udtf, strict=strict)
        if not isinstance(udtf, Chunker):
            raise UserInputError(
                f"create_udtf_view({name!r}) needs a function that is decorated with @chunker or "
                f"@udtf, not {udtf!r}."
            )
        return self._create_view(name, query.exploded(udtf), strict=strict)

    @writes
    def create_scalar_udtf_view(
        self,
        name: str,
        source: Query | Search | Table | str,
        scalar_udtf: Chunker | None = None,
        *,
        udtf: Chunker | None = None,
        strict: bool = False,
    ) -> MaterializedView:
        """Make a view of a chunker's rows: `create_udtf_view` by an earlier name."""
        given = [chunker for chunker in (scalar_udtf, udtf) if chunker is not None]
        if len(given) != 1:
            raise UserInputError(f"create_scalar_udtf_view({name!r}) needs one scalar_udtf=.")
        return self.create_udtf_view(name, source, given[0], strict=strict)

    def _create_partitioned_view(
        self, name: str, query: Query, udtf: UDTF, *, strict: bool
    ) -> MaterializedView:
        query.check_viewable()
        own, rows = query.table_function(udtf)
        refuse_blob_inside(udtf.name, *udtf.udf.outputs)
        check_functions([udtf.udf])
        ref = self._new_ref(name)
        self._check_stable_ids(query, strict=strict)
        address = relative_uri(self._uri, query.source.uri)
        create_partitioned_view(
            ref,
            open_dataset(query.source, query.source_version),
            replace(own, base_address=address),
            replace(rows, base_address=address),
            udtf.udf,
            self._trust.declare,
        )
        return self._open_view(name)

    def _new_ref(self, name: str) -> TableRef:
        check_table_name(name)
        ref = self._own_ref(name)  # in a folder without a version, a try before has failed
        if name in self.table_names() and has_versions(ref):
            raise UserInputError(f"There is a table or view {name!r} already.")
        return ref

    def _own_ref(self, name: str) -> TableRef:
        """Where a table of this name is, or would be, in the database itself."""
        return TableRef(name, table_uri(self._uri, name), self._storage_options)

    def _open_view(self, name: str) -> MaterializedView:
        """Open a view of Geneva's."""
        view = self.open_table(name)
        if not isinstance(view, MaterializedView):
            raise UserInputError(
                f"{name!r} is a table, not a view: open it with open_table, drop it with "
                "drop_table."
            )
        return view

    def list_materialized_views(self) -> list[ViewName]:
        """The names of the views, sorted: Geneva's and LanceDB's own. Each has its `kind`."""
        kinds = ((name, self._listed_kind(name)) for name in self.table_names())
        return [ViewName(name, kind) for name, kind in kinds if kind is not None]

    @overload
    def refresh(self, name: str, **options: Any) -> JobResult: ...
    @overload
    def refresh(
        self, name: None = None, **options: Unpack[WorkArguments]
    ) -> tuple[JobResult, ...]: ...
    def refresh(self, name: str | None = None, **options: Any) -> JobResult | tuple[JobResult, ...]:
        """Bring everything up to date, or one view: `db.open_table(name).refresh(...)`.

        Without a name, all computed columns and views of the database are brought up to date, in
        namespaces, too: sources before what is made from them, each by a job of its own. What has
        nothing to do gets no job. Where one fails, what is made from it is left out, all else is
        done, and `IncompleteRefreshError` says which. Branches are left alone. Options, of
        `geneva.options.WorkArguments`, are for each job.

        Returns:
            The outcome of the view's job; without a name those of all jobs, in their order.
        """
        if name is None:
            return refresh_database(self, options)
        return self._view_to_refresh(name).refresh(**options)

    def _view_to_refresh(self, name: str) -> MaterializedView:
        view = self.open_table(name)
        if not isinstance(view, MaterializedView):
            raise UserInputError(
                f"{name!r} is no view of Geneva's: only those are refreshed by name. Its computed "
                "columns are those of table.backfill(...), or of refresh() without a name."
            )
        return view

    @overload
    def plan_refresh(self, name: str, **options: Any) -> RefreshPlan: ...
    @overload
    def plan_refresh(self, name: None = None) -> DatabasePlan: ...
    def plan_refresh(self, name: str | None = None, **options: Any) -> DatabasePlan | RefreshPlan:
        """Say what `refresh()` would do, or that of one view. Changes nothing, runs nothing.

        Options are those of the view's own `plan_refresh`: the plan of a whole database has none.
        """
        if name is not None:
            return self._view_to_refresh(name).plan_refresh(**options)
        for option in options:
            raise UnknownOptionError(
                f"The plan for a whole database has no option {option!r}: those of a refresh are "
                "about how it works, and not about what there is to do."
            )
        return plan_database(self)

    def open_materialized_view(self, name: str) -> Any:
        """Open a view: Geneva's is a `MaterializedView`, LanceDB's is LanceDB's own object."""
        if self._view_kind(name) is ViewKind.LANCEDB:
            return self._database.open_materialized_view(name)
        return self._open_view(name)

    def _view_kind(self, name: str) -> ViewKind | None:
        """Whose view a table is; None of a table that is no view."""
        asked = TableName.parse(name)
        table = open_lancedb_table(self._database, asked, self._storage_options)
        if table is None:
            raise TableNotFoundError(self._not_found(asked))
        return view_kind(table.schema)

    def _listed_kind(self, name: str) -> ViewKind | None:
        """The same for a list: a table that can't be opened hides no other."""
        try:
            return self._view_kind(name)
        except BaseException as error:  # noqa: BLE001
            _LOG.warning("Table %r is left out of the list of views: %s", name, one_line(error))
            return None

    @writes
    def drop_table(
        self,
        name: str,
        namespace_path: Sequence[str] | None = None,
        ignore_missing: bool = False,  # noqa: FBT001, FBT002  (LanceDB's own signature)
    ) -> None:
        """Drop a table, as LanceDB does, also while a job writes into its folder."""
        place = list(namespace_path) if namespace_path else None
        drop_table(self._database, name, namespace_path=place, ignore_missing=ignore_missing)

    @writes
    def drop_materialized_view(
        self, name: str, namespace_path: Sequence[str] | None = None
    ) -> None:
        """Drop a view, Geneva's or LanceDB's; its source stays."""
        if namespace_path:
            self._database.drop_materialized_view(name, list(namespace_path))
            return
        is_place = name in list_table_places(self._database)
        if is_place and not has_versions(self._own_ref(name)):
            # What a job left in the folder of a view that was dropped under it.
            drop_table(self._database, name)
            return
        if self._view_kind(name) is ViewKind.LANCEDB:
            self._database.drop_materialized_view(name)
            return
        view = self._open_view(name)
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
            f"{how_to_get_stable_ids(query.source.name)}"
        )
        if strict:
            raise UserInputError(message)
        warn_user(message)

    def _source_ref(self, query: ViewQuery) -> TableRef:
        uri = joined_uri(self._uri, query.source_address)
        branch = TableName.parse(query.base_table).branch
        return TableRef(query.base_table, uri, self._storage_options, branch)

    def _source_of(self, view: TableRef, query: ViewQuery) -> TableRef | None:
        """The same; None of a view of another database, where addresses are that one's."""
        return self._source_ref(query) if is_relative(relative_uri(self._uri, view.uri)) else None

    def register_views(
        self,
        spark: SparkSession | None = None,
        *,
        names: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> list[str]:
        """Make every table and view a temporary view in Spark, under its own name, for SQL.

        Each is of the version that is the latest now: call it again to see newer ones. A table that
        Spark can't read is left out, with a warning, and so are tables whose names are one to
        Spark, which doesn't tell upper from lower case unless `spark.sql.caseSensitive` is true.

        Args:
            spark: The session; by default the one that jobs run on.
            names: Only these tables, as `open_table` takes them; None: all, with branches and those
                in namespaces.
            columns: By table, the columns to read. Spark reads all columns of a view, whichever a
                query needs, so that it is worth leaving out wide ones.

        Returns:
            The names of the views. Those that are no plain word are quoted in SQL: `a-b`.
        """
        from geneva.spark.source.frames import make_views

        session = self._session(spark)
        wanted = self.all_table_names() if names is None else list(names)
        narrow = dict(columns or {})
        unknown = sorted(narrow.keys() - set(wanted))
        if unknown:
            raise UserInputError(f"There is no table {unknown[0]!r} among {listed(wanted)}.")
        return make_views(
            session,
            wanted,
            lambda name: self.open_table(name).to_spark(session, columns=narrow.get(name)),
            required=narrow if names is None else wanted,
        )

    # -- clusters, manifests and contexts

    @writes
    def define_cluster(self, name: str, cluster: GenevaCluster) -> None:
        """Keep a cluster in the database under a name, instead of the one that is there."""
        self._clusters.put(name, replace(cluster, name=name).as_dict())

    def list_clusters(self) -> list[GenevaCluster]:
        """The clusters of this database, by name."""
        return [GenevaCluster.from_dict(facts) for facts in self._clusters.read().values()]

    def get_cluster(self, name: str) -> GenevaCluster:
        """A cluster by its name."""
        return GenevaCluster.from_dict(self._named(self._clusters, "cluster", name))

    @writes
    def delete_cluster(self, name: str) -> None:
        """Forget a cluster."""
        self._named(self._clusters, "cluster", name)
        self._clusters.delete(name)

    @writes
    def define_manifest(self, name: str, manifest: GenevaManifest) -> None:
        """Keep a manifest in the database under a name, instead of the one that is there.

        Its variables are there for everybody to read, so that keys are refused.
        """
        if keys := [variable for variable in manifest.env_vars if names_a_key(variable)]:
            raise UserInputError(
                f"Manifest {name!r} would keep {keys[0]!r} in the database, for everybody to read, "
                "and by its name that is a key. Give it to geneva.connect(env={...}), which keeps "
                "it nowhere; or use the manifest as it is: context(manifest=manifest)."
            )
        self._manifests.put(name, replace(manifest, name=name, checksum="").as_dict())

    def list_manifests(self) -> list[GenevaManifest]:
        """The manifests of this database, by name."""
        return [GenevaManifest.from_dict(facts) for facts in self._manifests.read().values()]

    def get_manifest(self, name: str) -> GenevaManifest:
        """A manifest by its name."""
        return GenevaManifest.from_dict(self._named(self._manifests, "manifest", name))

    @writes
    def delete_manifest(self, name: str) -> None:
        """Forget a manifest. Functions that were declared with it keep it as it was."""
        self._named(self._manifests, "manifest", name)
        self._manifests.delete(name)

    def _named(self, records: NamedRecords, kind: str, name: str) -> dict[str, Any]:
        found = records.read(name)
        if name not in found:
            known = list(records.read())
            raise UserInputError(
                f"There is no {kind} {name!r} in this database.{did_you_mean(name, known)} Known: "
                f"{listed(known)}."
            )
        return found[name]

    def capture_local_environment(self, *, skip_site_packages: bool = False) -> GenevaManifest:
        """A manifest of what is installed in this Python; nothing is uploaded."""
        from importlib.metadata import distributions

        installed = sorted({f"{d.name}=={d.version}" for d in distributions()})
        return GenevaManifest(
            name="local",
            pip=[] if skip_site_packages else installed,
            skip_site_packages=skip_site_packages,
        )

    def context(
        self,
        cluster: str | GenevaCluster | None = None,
        manifest: str | GenevaManifest | None = None,
        on_exit: ExitMode = ExitMode.DELETE,
        wait_timeout: timedelta | float | None = None,
    ) -> Context:
        """Run jobs on a cluster, with a manifest, from `with` to its end.

        It is of the whole connection: jobs of all threads run in it. A thread other than the main
        one that is inside keeps the others from entering one; give each a connection of its own.

        Args:
            cluster: One that was defined with `define_cluster`, or one itself. Without an address
                that Spark knows it means here: the connection's own session, or the embedded one.
            manifest: One that was defined with `define_manifest`, or one itself.
            on_exit: Whether to wait for jobs that still run, and to stop the cluster's session.
            wait_timeout: How long to wait for them.
        """
        return Context(
            self,
            self.get_cluster(cluster) if isinstance(cluster, str) else cluster,
            self.get_manifest(manifest) if isinstance(manifest, str) else manifest,
            ExitMode(on_exit),
            wait_timeout,
        )

    @hybrid_method
    def local_ray_context(self: Connection | None, **options: Any) -> AbstractContextManager[Any]:
        """Run jobs on this machine, as they do without it; `Connection.local_ray_context()`, too.

        There is no Ray here: the name is that of programs written for it.
        """
        return nullcontext() if self is None else self.context()

    @property
    def system_namespace(self) -> list[str]:
        """Where `geneva_jobs` and `geneva_errors` are, for `open_table(name, namespace=...)`."""
        return [SYSTEM_NAMESPACE]

    @property
    def effective_system_namespace(self) -> list[str]:
        """The same."""
        return self.system_namespace

    @property
    def user_db_uri(self) -> str:
        """Where the tables are, by Geneva's name."""
        return self._uri

    @property
    def system_table_db_uri(self) -> str:
        """Where Geneva's own tables are: in the same database."""
        return self._uri

    def is_remote(self) -> bool:
        """Whether a service runs the jobs: never here."""
        return False

    def close(self) -> None:
        """Nothing is held open; sessions of Spark are shared by all connections of a process."""

    def list_jobs(
        self, table_name: str | None = None, status: JobStatus | str | None = None
    ) -> list[JobRecord]:
        """The jobs of this database, newest first."""
        found = (as_it_runs(job, self._signals) for job in self._history.list(table_name, status))
        return JobRecords(_for_users(job) for job in found)

    def get_job(self, job_id: str | JobRecord | JobFuture) -> JobHandle:
        """One job with its events and metrics; to wait for it, follow it or stop it.

        Args:
            job_id: Its id, or the first characters of it if no other job's begins so; or what has
                one: a result, a future, a job of `list_jobs`.
        """
        wanted = _id_of(job_id)
        try:
            return self._handle(wanted)
        except JobNotFoundError:
            known = [job.job_id for job in self._history.list()]
        return self._handle(whole_id(wanted, known))

    @writes
    def cancel_job(self, job_id: str | JobRecord | JobFuture) -> None:
        """Ask a job to stop, whichever process runs it. It commits what is finished, then ends.

        The first characters of an id are not enough here: it would be another job that stops.
        """
        self._handle(_id_of(job_id)).cancel()

    def _handle(self, job_id: str) -> JobHandle:
        """The job of a whole id."""
        job = as_it_runs(self._history.job(job_id), self._signals)
        return JobHandle.of(job, self._history, self._signals, self._output)

    def _version_seen(self, lancedb_table: Any, version: int | None = None) -> VersionSeen | None:
        """The version that a handle reads, or another one, as it is in the folder of its table."""
        if local_path(self._uri) is None:
            return None
        uri = self._table_uri(lancedb_table)
        return version_seen(uri, int(lancedb_table.version) if version is None else version)

    def _table_uri(self, lancedb_table: Any) -> str:
        uri = without_file_scheme(str(lancedb_table.uri).rstrip("/"))
        return branch_uri(uri, lancedb_table.current_branch())

    def _table_ref(self, lancedb_table: Any) -> TableRef:
        options = {**self._storage_options, **(lancedb_table.initial_storage_options() or {})}
        branch = lancedb_table.current_branch()
        name = TableName(lancedb_table.name, tuple(lancedb_table.namespace), branch)
        uri = without_file_scheme(str(lancedb_table.uri).rstrip("/"))
        return TableRef(str(name), branch_uri(uri, branch), Secrets(options), branch)

    def _job(self, work: Work, on_commit: Callable[[], None], job_id: str | None = None) -> Job:
        if job_id is not None and self._history.events_of(job_id):
            raise UserInputError(f"There is a job {job_id!r} in this database already.")
        services = JobServices(
            history=self._history,
            signals=self._signals,
            failures=self._failures,
            output=self._output,
            hidden=self._hidden,
            settings=self._settings,
            make_runner=self._make_runner,
            make_committer=self._make_committer,
            context=self._contexts[-1].facts if self._contexts else {},
            permit=self._trust.permit,
        )
        return Job(work, services, on_commit, job_id)

    def _future(self, job: Job) -> JobFuture:
        """Start a job in the background; the context that it is in waits for it."""
        future = JobFuture(job)
        if self._contexts:
            self._contexts[-1].futures.append(future)
        return future

    @writes
    def cleanup_signals(self) -> int:
        """Remove heartbeats, requests and limits of jobs that are over; return of how many jobs.

        Those of dead jobs on a table are removed together with what they have left there, by the
        table's next job, `optimize` or `cleanup_checkpoints`. This is for tables that are gone.
        """
        known, jobs = self._signals.jobs(), self._history.list()
        ended = {job.job_id for job in jobs if job.status.is_final} & known
        for job_id in ended:
            self._signals.clear(job_id)
        return len(ended | remove_limits(self._signals, jobs))

    def _remove_dead(
        self, table: str, refs: Sequence[TableRef], older_than: timedelta = A_DAY
    ) -> CleanupReport:
        """Remove what jobs and workers that died on a table have left behind."""
        return remove_dead(table, refs, self._history, self._signals, older_than=older_than)

    def _slots(self) -> int:
        """How many tasks would run at once. Starts nothing to know it."""
        if self._runner is not None:
            return self._runner().slots
        from geneva.spark.embedded.settings import available_cores
        from geneva.spark.sessions import slots_of

        slots = slots_of(self._spark) if self._spark is not None else None
        return slots or self._settings.local_slots or available_cores()

    def _measured_before(self, plan: BackfillPlan) -> Measured | None:
        """What calls of a plan's function took: in a preview of this connection, or in a job."""
        measured = self._measured.get((plan.table, plan.udf_version))
        if measured is not None:
            return measured
        job = self._history.last_measured(plan.table, plan.column, plan.udf_version)
        if job is None:
            return None
        per_row = job.metrics.get("udf_seconds", 0.0) / job.metrics["udf_rows"]
        return Measured(per_row, f"job {job.job_id[:8]}")

    def _make_runner(self) -> Runner:
        if self._runner is not None:
            return self._runner()
        runner = self._spark_runner()
        if modules := modules_of([context.manifest for context in self._contexts]):
            runner.ship_modules(modules)
        return runner

    def _spark_runner(self) -> SparkRunner:
        from geneva.spark.runner import SparkRunner

        return SparkRunner(
            self._session(),
            gpus=self._settings.local_gpus,
            env=self._variables,
            environment_before=_ENVIRONMENT_BEFORE,
        )

    @property
    def _variables(self) -> Secrets:
        """What is set where functions run: variables of the contexts, and over them `env`."""
        given: dict[str, str] = {}
        for context in self._contexts:
            given |= context.manifest.env_vars if context.manifest is not None else {}
        return Secrets({**given, **self._env})

    @property
    def _hidden(self) -> tuple[Secrets, ...]:
        """What no text about a function may show."""
        return self._variables, self._storage_options

    def _session(self, spark: SparkSession | None = None) -> SparkSession:
        """The Spark session to work on: the one given, the context's, this connection's, ours."""
        of_context = self._contexts[-1].session() if spark is None and self._contexts else None
        for session in (spark, of_context, self._spark):
            if session is not None:
                return session
        from geneva.spark.embedded.settings import LocalOptions
        from geneva.spark.sessions import embedded_session

        options = replace(
            LocalOptions(),
            slots=self._settings.local_slots,
            class_archive=self._settings.jvm_archive,
            ui=self._settings.spark_ui,
        )
        return embedded_session(options)
