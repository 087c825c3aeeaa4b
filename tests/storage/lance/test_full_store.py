"""A store without space, or that may not be written to: a sentence, and nothing is lost."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lancedb.db import AsyncConnection, LanceDBConnection
from lancedb.table import AsyncTable, LanceTable

from geneva import Connection, Table, udf
from geneva.cluster import GenevaCluster
from geneva.errors import StorageFullError, StorageUnavailableError, TableNotFoundError
from geneva.execution.runner import InProcessRunner
from geneva.manifest import GenevaManifest
from geneva.storage.lance.damage import writing
from geneva.storage.lance.delegation import is_writing
from geneva.storage.lance.lancedb_methods import ConnectionMethods, TableMethods
from geneva.table import Branches
from geneva.view import MaterializedView
from support import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")


@udf(data_type=pa.int64())
def doubled(id: int) -> int:
    return 2 * id


@udf(data_type=pa.int64())
def tripled(id: int) -> int:
    return 3 * id


@contextmanager
def no_space() -> Iterator[None]:
    """No file may grow: what is written fails with EFBIG, as with ENOSPC on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def table(local_db: Connection) -> Table:
    table = local_db.create_table("t", pa.table({"id": [1, 2]}))
    table.add(pa.table({"id": [3]}))
    table.add_columns({"x": doubled})
    table.backfill("x")
    return table


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.add_columns({"y": doubled}),
        lambda table: table.alter_columns({"path": "x", "udf": tripled}),
        lambda table: table.alter_columns({"path": "id", "rename": "key"}),
        lambda table: table.drop_columns(["x"]),
        lambda table: table.optimize(),
        lambda table: table.compact_files(),
        lambda table: table.restore(1),
        lambda table: table.add(pa.table({"id": [4]})),
        lambda table: table.delete("id = 1"),
        lambda table: (
            table.merge_insert("id").when_not_matched_insert_all().execute(pa.table({"id": [4]}))
        ),
        lambda table: table.backfill("x", where="id = 1"),
        lambda table: table.backfill("x", udf=tripled),
        lambda table: table.load_columns(pa.table({"id": [1], "z": [1]}), "id", "z"),
        lambda table: table.tags.create("one", 1),
        lambda table: table.branches.create("other"),
    ],
)
def test_what_needs_space_says_so_and_changes_nothing(
    table: Table, write: Callable[[Table], Any]
) -> None:
    before = table.to_arrow()
    with no_space(), pytest.raises(StorageFullError, match=r"table 't'.* Make room and run again"):
        write(table)
    assert table.to_arrow().equals(before)
    assert table.plan_backfill("x").is_empty
    write(table)


@pytest.mark.parametrize(
    "write",
    [
        lambda db: db.copy_table("t", "copy"),
        lambda db: db.clone_table("clone", db.open_table("t").ref.uri),
        lambda db: db.create_namespace(["folder"]),
        lambda db: db.create_materialized_view("lances", "t"),
        lambda db: db.define_cluster("c", GenevaCluster.create_spark("c").build()),
        lambda db: db.define_manifest("m", GenevaManifest("m")),
        lambda db: db.open_table("v").alter_columns({"path": "x", "udf": tripled}),
        lambda db: db.open_table("v").add_columns({"y": doubled}),
        lambda db: db.refresh("v"),
    ],
)
def test_so_does_what_a_database_and_a_view_write(
    local_db: Connection, table: Table, write: Callable[[Connection], Any]
) -> None:
    local_db.create_materialized_view("v", table.search(None).select({"id": "id", "x": doubled}))
    with no_space(), pytest.raises(StorageFullError, match=r"No space.* Make room and run again"):
        write(local_db)
    write(local_db)


JOBS = {"backfill", "backfill_async", "load_columns", "load_columns_async"}
JOBS |= {"refresh", "refresh_async"}
"""Methods that start a job, which says it itself."""
READING = {
    Table: "branches checkout checkout_latest computed_columns count_rows get_errors "
    "get_failed_row_addresses get_fragments get_reference head limit list_computed_columns name "
    "offset plan_backfill preview query ref schema search stored_functions tags take_blobs "
    "take_offsets take_row_ids to_arrow to_pandas to_polars to_spark verify version",
    MaterializedView: "definition get_errors plan_refresh preview source_version table",
    Branches: "checkout",
    Connection: "all_table_names capture_local_environment close context "
    "effective_system_namespace get_cluster get_job get_manifest get_table is_remote "
    "list_clusters list_jobs list_manifests list_materialized_views local_ray_context "
    "namespace_client_impl namespace_client_properties namespace_client_pushdown_operations "
    "open_materialized_view open_table plan_refresh register_views system_namespace "
    "system_table_db_uri table_names uri user_db_uri",
}
LANCEDB_READING = {
    TableMethods: "blob_columns current_branch embedding_functions fetch_blob_files "
    "fetch_blob_ranges fetch_blobs function_errors get_lsm_stats get_lsm_write_spec id index_stats "
    "infer_tokenizer_configs initial_storage_options latest_storage_options list_indices "
    "list_versions namespace prewarm_data prewarm_index stats to_lance tokenize uri "
    "uses_v2_manifest_paths wait_for_index",
    ConnectionMethods: "describe_namespace describe_query describe_secret describe_view "
    "get_function list_functions list_namespaces list_secrets list_tables list_views "
    "namespace_client namespace_exists open_job read_consistency_interval serialize session "
    "table_exists",
}


@pytest.mark.parametrize("kind", READING, ids=lambda kind: kind.__name__)
def test_every_method_reads_or_says_why_it_can_not_write(kind: type) -> None:
    for name, method in public(kind):
        refuses = "NoReturn" in str(getattr(method, "__annotations__", {}).get("return"))
        within_lancedbs = kind is Table and name == "restore"
        says = getattr(method, "writes", False) or name in JOBS or within_lancedbs or refuses
        assert says is (name not in READING[kind].split()), name


@pytest.mark.parametrize("kind", LANCEDB_READING, ids=lambda kind: kind.__name__)
def test_so_does_every_method_of_lancedbs(kind: type) -> None:
    for name, _ in public(kind):
        assert is_writing(name) is (name not in LANCEDB_READING[kind].split()), name


@pytest.mark.parametrize("kind", [LanceTable, AsyncTable, LanceDBConnection, AsyncConnection])
def test_lancedbs_methods_are_not_taken_for_the_users_code(kind: type) -> None:
    for name, method in public(kind):
        if is_writing(name) and callable(method):
            fail = {**method.__globals__, "writing": writing, "error": PermissionError(13, "no")}
            with pytest.raises(StorageUnavailableError):
                exec("with writing(''):\n    raise error", fail)


def public(kind: type) -> list[tuple[str, Any]]:
    return [(name, found) for name, found in vars(kind).items() if not name.startswith("_")]


@pytest.mark.parametrize("read", [None, 2, "two"])
def test_a_restore_that_fails_leaves_the_handle_as_it_was(
    table: Table, read: int | str | None
) -> None:
    table.tags.create("two", 2)
    if read is not None:
        table.checkout(read)
    before = table.version
    with no_space(), pytest.raises(StorageFullError):
        table.restore(1)
    assert table.version == before
    assert len(table) == 3


def test_a_table_or_view_that_there_is_no_space_for(local_db: Connection, table: Table) -> None:
    with no_space(), pytest.raises(StorageFullError, match=r"left for create_table of 'u'"):
        local_db.create_table("u", pa.table({"id": [1]}))
    with no_space(), pytest.raises(OSError, match="create_materialized_view of 'v'"):
        local_db.create_materialized_view("v", table.search(None))
    local_db.create_table("u", pa.table({"id": [1]}))
    assert local_db.create_materialized_view("v", table.search(None)).refresh().rows_committed == 3


def fail_to_write(error: Exception, module: str = "lancedb.table") -> None:
    """Fail in code of this module."""
    code = "with writing('add of table t'):\n    raise error"
    exec(code, {"__name__": module, "writing": writing, "error": error})


NAMESPACE = "Namespace error: IO { source: Os { code: 13, kind: PermissionDenied, message"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError("LanceError(IO): Read-only file system (os error 30) at path x, /a/b.rs:1:2"),
        RuntimeError("lance error: LanceError(IO): Permission denied (os error 13), /a/b.rs:1:2"),
        RuntimeError(f"lance error: {NAMESPACE}"),
    ],
)
def test_what_may_not_be_written_to(error: Exception) -> None:
    said = r"does not allow add.*right to read or write"
    with pytest.raises(StorageUnavailableError, match=said):
        fail_to_write(error)
    with pytest.raises(type(error)) as caught:
        fail_to_write(error, "users.own")
    assert caught.value is error


class TestJobs:
    """Jobs do more than to read and write their table: what that is refused is not the store's."""

    @staticmethod
    def backfill(db: Connection, error: OSError, *, drop: bool = False) -> None:
        class Runner(InProcessRunner):
            def __init__(self) -> None:
                if drop:
                    shutil.rmtree(f"{db.uri}/t.lance")
                raise error

        connect(Path(db.uri), Runner).open_table("t").backfill("x", where="id = 1")

    @pytest.mark.parametrize("place", ["/opt/java/bin/java", "{uri}-2/t.lance", "/opt{uri}/x"])
    def test_what_is_refused_elsewhere(
        self, local_db: Connection, table: Table, place: str
    ) -> None:
        file = place.format(uri=local_db.uri)
        with pytest.raises(PermissionError, match=re.escape(file)):
            self.backfill(local_db, PermissionError(13, "Permission denied", file))
        assert "PermissionError" in str(local_db.list_jobs()[0].error)

    @pytest.mark.parametrize("place", ["{uri}", "{uri}/t.lance/data/x", "{uri}/_geneva/signals/y"])
    def test_what_the_store_refuses(self, local_db: Connection, table: Table, place: str) -> None:
        file = place.format(uri=local_db.uri)
        said = rf"does not allow the backfill of column 'x'.*{re.escape(file)}.*read or write there"
        with pytest.raises(StorageUnavailableError, match=said):
            self.backfill(local_db, PermissionError(13, "Permission denied", file))
        lance_says = (
            f'LanceError(IO): Permission denied (os error 13) at path "{file}", /a/b.rs:1:2'
        )
        with pytest.raises(StorageUnavailableError, match=said):
            self.backfill(local_db, OSError(lance_says))

    def test_a_table_that_was_dropped_meanwhile(self, local_db: Connection, table: Table) -> None:
        file = f"{table.ref.uri}/data/x"
        error = PermissionError(13, "Permission denied", file)
        with pytest.raises(TableNotFoundError, match="was dropped"):
            self.backfill(local_db, error, drop=True)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match="mine"), writing("add"):
        raise ValueError("mine")


FULL = "LanceError(IO): No space left on device (os error 28)"
REFUSED = "LanceError(IO): Permission denied (os error 13)"


@pytest.mark.parametrize("message", [FULL, REFUSED])
@pytest.mark.parametrize(
    "write",
    [
        lambda table, _: table.update(values_sql={"id": "cast(said as bigint)"}),
        lambda table, _: table.add_columns({"n": "cast(said as bigint)"}),
        lambda table, _: table.delete("cast(said as bigint) = 3"),
        lambda table, message: table.delete(f"sad = '{message}'"),
    ],
)
def test_what_values_say_is_not_about_the_store(
    local_db: Connection, write: Callable[[Table, str], Any], message: str
) -> None:
    table = local_db.create_table("log", pa.table({"id": [1], "said": [message]}))
    with pytest.raises((RuntimeError, ValueError), match=r"Cast error|No field named sad"):
        write(table, message)


OF_USERS = [
    OSError(28, "No space left on device"),
    OSError(FULL),
    PermissionError(13, "the API said no"),
    OSError(REFUSED),
    RuntimeError("polars: Permission denied (os error 13): /data/my.parquet"),
]


@pytest.mark.parametrize("error", OF_USERS, ids=str)
def test_nor_is_what_the_source_of_rows_says(local_db: Connection, error: Exception) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"id": [1]})
        raise error

    table = local_db.create_table("t", pa.table({"id": [1]}))
    with pytest.raises(RuntimeError, match=r"Python exception: Traceback[^$]* in rows"):
        table.add(pa.RecordBatchReader.from_batches(table.schema, rows()))
    with pytest.raises(RuntimeError, match=r"Python exception: Traceback[^$]* in rows"):
        local_db.create_table("u", rows(), schema=table.schema)


@pytest.mark.parametrize("error", OF_USERS, ids=str)
def test_nor_is_what_it_says_before_the_first_row(local_db: Connection, error: Exception) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        raise error
        yield

    table = local_db.create_table("t", pa.table({"id": [1]}))
    for write in (table.add, lambda data: local_db.create_table("u", data, schema=table.schema)):
        with pytest.raises(type(error)) as caught:
            write(rows())
        assert caught.value is error


@pytest.mark.parametrize(
    "said",
    [
        "LanceError(IO): Disk quota exceeded (os error 122), /a/b.rs:1:2",
        f"lance error: {FULL}",
        f"LanceError(IO): Execution error: External: {FULL} at path x",
        "called `Result::unwrap()` on an `Err` value: Os { code: 28, kind: StorageFull }",
    ],
)
def test_what_lance_says_of_a_full_store(said: str) -> None:
    with pytest.raises(StorageFullError, match="No space is left for add"):
        fail_to_write(RuntimeError(said))


def test_so_are_those_of_the_rows_own_files(local_db: Connection, table: Table) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        raise PermissionError(13, "Permission denied", "rows.csv")
        yield

    with pytest.raises(PermissionError, match=r"rows\.csv"):
        table.add(rows())
    with pytest.raises(PermissionError, match=r"rows\.csv"):
        local_db.create_table("u", rows(), schema=pa.schema([("id", pa.int64())]))
