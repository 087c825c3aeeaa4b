"""LanceDB's own methods with their parameters. Made by scripts/lancedb-methods.

Table and connection have all of these by inheritance, so that editors and type checkers know them;
each call goes to LanceDB's object as it was made. Methods that ours replace are not here.
"""

# mypy: disable-error-code="empty-body, no-untyped-def, type-arg"
from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geneva.storage.lance.delegation import Delegating, delegated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Literal
    from uuid import UUID

    import lance
    import pyarrow as pa
    from lance_namespace import LanceNamespace
    from lance_namespace_urllib3_client.models.create_namespace_response import (
        CreateNamespaceResponse,
    )
    from lance_namespace_urllib3_client.models.describe_namespace_response import (
        DescribeNamespaceResponse,
    )
    from lance_namespace_urllib3_client.models.drop_namespace_response import DropNamespaceResponse
    from lance_namespace_urllib3_client.models.list_namespaces_response import (
        ListNamespacesResponse,
    )
    from lance_namespace_urllib3_client.models.list_tables_response import ListTablesResponse
    from lancedb._blob import BlobFile
    from lancedb._lancedb import (
        AddResult,
        DeleteResult,
        FtsToken,
        FunctionErrors,
        LsmWriteSpec,
        RefreshColumnResult,
        Session,
        UpdateFieldMetadataResult,
        UpdateResult,
    )
    from lancedb.db import QueryDescription, SqlQuery
    from lancedb.embeddings.base import EmbeddingFunctionConfig
    from lancedb.expr import Expr
    from lancedb.functions import FunctionVersion, UdfDefinition
    from lancedb.index import IndexConfig
    from lancedb.job import Job
    from lancedb.merge import LanceMergeInsertBuilder
    from lancedb.pydantic import LanceModel
    from lancedb.secrets import EnvVarSecret, SecretInfo
    from lancedb.table import (
        DATA,
        IndexConfigType,
        IndexStatistics,
        LanceTable,
        RefreshColumnJobResult,
        TableStatistics,
    )
    from lancedb.types import AddMode, BaseTokenizerType, OnBadVectorsType, ScalarIndexType
    from lancedb.view import ViewDescription


class TableMethods(Delegating):
    """What a table of LanceDB's can do, too."""

    @delegated
    def add(
        self,
        data: DATA,
        mode: AddMode = "append",
        on_bad_vectors: OnBadVectorsType = "error",
        fill_value: float = 0.0,
        progress: bool | Callable | Any | None = None,
        write_parallelism: int | None = None,
        allow_external_blob_outside_bases: bool = False,
    ) -> AddResult:
        """Call LanceDB's `add`."""

    @delegated
    def blob_columns(self) -> list[str]:
        """Names of the blob v2 columns declared on this table."""

    @delegated
    def checkpoint_lsm(self) -> None:
        """Call LanceDB's `checkpoint_lsm`."""

    @delegated
    def close_lsm_writers(self) -> None:
        """Close cached MemWAL shard writers."""

    @delegated
    def compact_lsm(self) -> None:
        """Call LanceDB's `compact_lsm`."""

    @delegated
    def create_fts_index(
        self,
        field_names: Any,
        *,
        ordering_field_names: Any = None,
        replace: bool = False,
        writer_heap_size: Any = 1073741824,
        use_tantivy: bool = False,
        tokenizer_name: Any = None,
        with_position: bool = False,
        base_tokenizer: BaseTokenizerType = "simple",
        language: str = "English",
        max_token_length: Any = 40,
        lower_case: bool = True,
        stem: bool = True,
        remove_stop_words: bool = True,
        custom_stop_words: Any = None,
        ascii_folding: bool = True,
        ngram_min_length: int = 3,
        ngram_max_length: int = 3,
        prefix_only: bool = False,
        block_size: int = 128,
        document_granularity: Any = "row",
        name: Any = None,
    ) -> Any:
        """Create a full-text search index on a column."""

    @delegated
    def create_index(
        self,
        metric: str = "l2",
        num_partitions: int | None = None,
        num_sub_vectors: int | None = None,
        vector_column_name: str = "vector",
        replace: bool = True,
        accelerator: str | None = None,
        index_cache_size: int | None = None,
        num_bits: int = 8,
        index_type: Literal[
            "IVF_FLAT", "IVF_SQ", "IVF_PQ", "IVF_RQ", "IVF_HNSW_SQ", "IVF_HNSW_PQ", "IVF_HNSW_FLAT"
        ] = "IVF_PQ",
        max_iterations: int = 50,
        sample_rate: int = 256,
        m: int = 20,
        ef_construction: int = 300,
        *,
        config: IndexConfigType | None = None,
        wait_timeout: timedelta | None = None,
        name: str | None = None,
        train: bool = True,
        target_partition_size: int | None = None,
    ) -> Any:
        """Create an index on a column."""

    @delegated
    def create_index_async(
        self,
        column: str,
        *,
        config: IndexConfigType,
        replace: bool | None = None,
        wait_timeout: timedelta | None = None,
        name: str | None = None,
        train: bool = True,
    ) -> Job:
        """Create an index, returning a handle to the indexing job."""

    @delegated
    def create_scalar_index(
        self,
        column: str,
        *,
        replace: bool = True,
        index_type: ScalarIndexType = "BTREE",
        name: Any = None,
    ) -> Any:
        """Create a scalar index on a column."""

    @delegated
    def current_branch(self) -> str | None:
        """The branch this table handle is scoped to, or ``None`` for ``main``."""

    @delegated
    def delete(self, where: str | Expr) -> DeleteResult:
        """Delete rows from the table."""

    @delegated
    def drop_index(self, name: str) -> None:
        """Drops an index from the table."""

    @property
    def embedding_functions(self) -> dict[str, EmbeddingFunctionConfig]:
        """Get the embedding functions for the table."""
        return self._lancedb().embedding_functions

    @delegated
    def fetch_blob_files(self, column: str, row_ids: list[int] | pa.Table) -> list[BlobFile | None]:
        """Open lazy, seekable :class:`~lancedb._blob.BlobFile` handles."""

    @delegated
    def fetch_blob_ranges(
        self, column: str, requests: Sequence[tuple[int, int, int]]
    ) -> pa.LargeBinaryArray:
        """Materialize row-specific byte ranges from a blob v2 column."""

    @delegated
    def fetch_blobs(self, column: str, row_ids: list[int] | pa.Table) -> pa.LargeBinaryArray:
        """Materialize full blob bytes for ``column`` at the given rows."""

    @delegated
    def flush_lsm(self) -> None:
        """Synchronous version of [`AsyncTable.flush_lsm`][lancedb.AsyncTable.flush_lsm]."""

    @delegated
    def function_errors(
        self, job_id: str | None = None, column: str | None = None, limit: int | None = None
    ) -> FunctionErrors:
        """The per-row errors Function refreshes recorded on this table."""

    @delegated
    def get_lsm_stats(self, *, include_generation_rows: bool = False) -> dict | None:
        """Call LanceDB's `get_lsm_stats`."""

    @delegated
    def get_lsm_write_spec(self) -> LsmWriteSpec | None:
        """Read the installed LsmWriteSpec, or ``None``."""

    @property
    def id(self) -> str:
        """Return the full identifier of the table (namespace$name)."""
        return self._lancedb().id

    @delegated
    def index_stats(self, index_name: str) -> IndexStatistics | None:
        """Retrieve statistics about an index."""

    @delegated
    def infer_tokenizer_configs(self, tokenizer_name: str) -> dict:
        """Call LanceDB's `infer_tokenizer_configs`."""

    @delegated
    def initial_storage_options(self) -> dict[str, str] | None:
        """Get the initial storage options that were passed in when opening this table."""

    @delegated
    def latest_storage_options(self) -> dict[str, str] | None:
        """Get the latest storage options, refreshing from provider if configured."""

    @delegated
    def list_indices(self) -> Iterable[IndexConfig]:
        """List all indices that have been created with Self::create_index."""

    @delegated
    def list_versions(self) -> list[dict[str, Any]]:
        """List all versions of the table."""

    @delegated
    def merge(
        self,
        other_table: LanceTable | DATA,
        left_on: str,
        right_on: str | None = None,
        schema: pa.Schema | LanceModel | None = None,
    ) -> Any:
        """Merge another table into this table."""

    @delegated
    def merge_insert(self, on: str | Iterable[str]) -> LanceMergeInsertBuilder:
        """Call LanceDB's `merge_insert`."""

    @delegated
    def migrate_v2_manifest_paths(self) -> Any:
        """Migrate the manifest paths to the new format."""

    @property
    def namespace(self) -> list[str]:
        """Return the namespace path of the table."""
        return self._lancedb().namespace

    @delegated
    def prewarm_data(self, columns: list[str] | None = None) -> None:
        """Prewarm data for the table."""

    @delegated
    def prewarm_index(self, name: str) -> None:
        """Prewarm an index in the table."""

    @delegated
    def refresh_column(self, column: str) -> RefreshColumnResult:
        """Fill a computed column's unfilled rows and recompute those whose inputs changed."""

    @delegated
    def refresh_column_async(self, column: str) -> Job[RefreshColumnJobResult]:
        """Call LanceDB's `refresh_column_async`."""

    @delegated
    def replace_field_metadata(self, field_name: str, new_metadata: Any) -> Any:
        """Replace the metadata of a field in the schema."""

    @delegated
    def set_lsm_write_spec(self, spec: LsmWriteSpec) -> None:
        """Install an LsmWriteSpec."""

    @delegated
    def set_unenforced_primary_key(self, columns: str | Iterable[str]) -> None:
        """Set the unenforced primary key."""

    @delegated
    def stats(self) -> TableStatistics:
        """Retrieve table and fragment statistics."""

    @delegated
    def to_lance(self, **kwargs: Any) -> lance.LanceDataset:
        """Return the LanceDataset backing this table."""

    @delegated
    def tokenize(
        self, query: str, *, column: str | None = None, index_name: str | None = None
    ) -> Iterable[FtsToken]:
        """Tokenize a query using the tokenizer configured on an FTS index."""

    @delegated
    def unset_lsm_write_spec(self) -> None:
        """Remove the LsmWriteSpec."""

    @delegated
    def update(
        self,
        where: str | Expr | None = None,
        values: dict | None = None,
        *,
        values_sql: dict[str, str] | None = None,
    ) -> UpdateResult:
        """Call LanceDB's `update`."""

    @delegated
    def update_field_metadata(self, *updates: dict[str, Any]) -> UpdateFieldMetadataResult:
        """Update per-field (column) metadata."""

    @property
    def uri(self) -> str:
        """Call LanceDB's `uri`."""
        return self._lancedb().uri

    @delegated
    def uses_v2_manifest_paths(self) -> bool:
        """Check if the table is using the new v2 manifest paths."""

    @delegated
    def wait_for_index(
        self, index_names: Iterable[str], timeout: timedelta = timedelta(seconds=300)
    ) -> None:
        """Call LanceDB's `wait_for_index`."""


class ConnectionMethods(Delegating):
    """What a connection of LanceDB's can do, too."""

    @delegated
    def alter_secret(
        self, name: str, value: str, *, namespace_path: list[str] | None = None
    ) -> None:
        """Replace the credential behind an existing Secret."""

    @delegated
    def create_function(
        self,
        definition: UdfDefinition,
        *,
        secrets: Sequence[EnvVarSecret] | None = None,
        namespace_path: list[str] | None = None,
    ) -> FunctionVersion:
        """Build and register a scalar Python UDF, then return its version."""

    @delegated
    def create_function_async(
        self,
        definition: UdfDefinition,
        *,
        secrets: Sequence[EnvVarSecret] | None = None,
        namespace_path: list[str] | None = None,
    ) -> Job[FunctionVersion]:
        """Submit a scalar Python UDF for building and registration."""

    @delegated
    def create_namespace(
        self,
        namespace_path: list[str],
        mode: str | None = None,
        properties: dict[str, str] | None = None,
    ) -> CreateNamespaceResponse:
        """Create a new namespace."""

    @delegated
    def create_secret(
        self, name: str, value: str, *, namespace_path: list[str] | None = None
    ) -> None:
        """Create a named Secret in this database."""

    @delegated
    def describe_namespace(self, namespace_path: list[str]) -> DescribeNamespaceResponse:
        """Describe a namespace."""

    @delegated
    def describe_query(self, query_id: UUID) -> QueryDescription:
        """Describe a submitted SQL query by its connection-scoped id."""

    @delegated
    def describe_secret(self, name: str, *, namespace_path: list[str] | None = None) -> SecretInfo:
        """What this database records about a Secret: name and timestamps."""

    @delegated
    def describe_view(
        self, name: str, *, namespace_path: list[str] | None = None
    ) -> ViewDescription:
        """Call LanceDB's `describe_view`."""

    @delegated
    def drop_all_tables(self, namespace_path: list[str] | None = None) -> Any:
        """Drop all tables from the database."""

    @delegated
    def drop_database(self) -> Any:
        """Drop database This is the same thing as dropping all the tables."""

    @delegated
    def drop_function(
        self, name: str, *, version: str, namespace_path: list[str] | None = None
    ) -> bool:
        """Drop a Function name and the object it was bound to."""

    @delegated
    def drop_function_async(
        self, name: str, *, version: str, namespace_path: list[str] | None = None
    ) -> tuple[bool, Job]:
        """Drop a Function name and return its cleanup job."""

    @delegated
    def drop_materialized_view_async(
        self, name: str, namespace_path: list[str] | None = None
    ) -> Job[None]:
        """Start dropping a materialized view and return its cleanup job."""

    @delegated
    def drop_namespace(
        self, namespace_path: list[str], mode: str | None = None, behavior: str | None = None
    ) -> DropNamespaceResponse:
        """Drop a namespace."""

    @delegated
    def drop_secret(self, name: str, *, namespace_path: list[str] | None = None) -> None:
        """Drop a Secret."""

    @delegated
    def drop_table_async(self, name: str, namespace_path: list[str] | None = None) -> Job:
        """Start dropping a table and return its cleanup job."""

    @delegated
    def drop_view(self, name: str, *, namespace_path: list[str] | None = None) -> None:
        """Drop a view and wait for its definition to be deleted."""

    @delegated
    def drop_view_async(self, name: str, *, namespace_path: list[str] | None = None) -> Job[None]:
        """Start dropping a view and return the job deleting its definition."""

    @delegated
    def execute_query(self, query: str, *, default_namespace_path: list[str] | None = None) -> Any:
        """Execute SQL and return a blocking Arrow reader."""

    @delegated
    def execute_query_async(
        self, query: str, *, default_namespace_path: list[str] | None = None
    ) -> SqlQuery:
        """Start executing SQL and return its query handle."""

    @delegated
    def get_function(
        self, name: str, *, version: str, namespace_path: list[str] | None = None
    ) -> FunctionVersion:
        """Open one exact immutable Function version from the remote catalog."""

    @delegated
    def list_functions(self, *, namespace_path: list[str] | None = None) -> list[FunctionVersion]:
        """List every published immutable Function version in a namespace."""

    @delegated
    def list_namespaces(
        self,
        namespace_path: list[str] | None = None,
        page_token: str | None = None,
        limit: int | None = None,
    ) -> ListNamespacesResponse:
        """List immediate child namespace names in the given namespace."""

    @delegated
    def list_secrets(self, *, namespace_path: list[str] | None = None) -> list[str]:
        """The names of every Secret in this database."""

    @delegated
    def list_tables(
        self,
        namespace_path: list[str] | None = None,
        page_token: str | None = None,
        limit: int | None = None,
    ) -> ListTablesResponse:
        """List all tables in this database with pagination support."""

    @delegated
    def list_views(self, *, namespace_path: list[str] | None = None) -> list[str]:
        """The names of the views in one namespace."""

    @delegated
    def namespace_client(self) -> LanceNamespace:
        """Get the equivalent namespace client for this connection."""

    @delegated
    def namespace_exists(self, namespace_id: list[str]) -> bool:
        """Check if a namespace exists."""

    @delegated
    def open_job(self, job_id: str) -> Job:
        """Open a server-side job by id."""

    @delegated
    def pause_job(self, job_id: str) -> str:
        """Pause a server-side job by id."""

    @property
    def read_consistency_interval(self) -> timedelta | None:
        """Call LanceDB's `read_consistency_interval`."""
        return self._lancedb().read_consistency_interval

    @delegated
    def rename_table(
        self,
        cur_name: str,
        new_name: str,
        cur_namespace_path: list[str] | None = None,
        new_namespace_path: list[str] | None = None,
    ) -> Any:
        """Rename a table in the database."""

    @delegated
    def resume_job(self, job_id: str) -> str:
        """Resume a paused server-side job by id."""

    @delegated
    def serialize(self) -> str:
        """Serialize this connection for reconstruction."""

    @property
    def session(self) -> Session | None:
        """Call LanceDB's `session`."""
        return self._lancedb().session

    @delegated
    def table_exists(self, table_id: list[str]) -> bool:
        """Check if a table exists."""
