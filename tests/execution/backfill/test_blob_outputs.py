"""Functions that return blobs: what is stored reads back, through whatever happens to the table."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.blob import BlobFile, BlobType

import geneva
from geneva import UDF, Connection, Table
from geneva.errors import InvalidUDFError, UDFOutputError
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.runner import InProcessRunner
from geneva.on_error import skip_on_error
from processes import finish, start_script
from s3_server import Bucket, bucket, s3_endpoint
from support import Calls, connect, counted, make_table, publishing

__all__ = ["bucket", "s3_endpoint"]  # fixtures: pytest finds them by name

MARK = {"lance-encoding:blob": "true"}
every_version = pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
SIZES = [0, 1, 70_000, 5_000_000]
"""Lance keeps these at four places: none, in the data file, in a shared file, in one of its own."""


def content(id: int) -> bytes | None:
    return None if id % 5 == 4 else bytes([id % 256]) * SIZES[id % 5]


def blob_udf(calls: Calls, function: Any = content, **options: Any) -> UDF:
    given = {"data_type": pa.large_binary(), "field_metadata": MARK, **options}
    return counted(calls, function, **given)


def stored(table: Table, column: str = "b") -> dict[int, bytes | None]:
    """What `take_blobs` gives, by id."""
    dataset = table.to_lance()
    ids = dataset.to_table(columns=["id"])["id"].to_pylist()
    files = dataset.take_blobs(column, indices=range(len(ids)))
    found = [file.readall() if file is not None else None for file in files]
    return dict(zip(ids, found, strict=True))


def expected(*ids: int) -> dict[int, bytes | None]:
    return {i: content(i) for i in ids}


@every_version
def test_blobs_are_stored_and_kept(local_db: Connection, calls: Calls, version: str) -> None:
    table = make_table(local_db, [4, 3], storage_version=version, stable_row_ids=True)
    table.add_columns({"b": blob_udf(calls)})
    table.backfill("b")
    assert calls.taken() == list(range(7))
    assert stored(table) == expected(*range(7))
    assert str(table.backfill("b")).startswith("DONE: nothing to do")

    table.update(where="id = 3", values={"id": 8})
    table.delete("id = 0")
    table.backfill("b")
    assert calls.taken() == [8], "just the row that changed"
    assert stored(table) == expected(1, 2, 4, 5, 6, 8)

    table.compact_files()
    assert str(table.backfill("b")).startswith("DONE: nothing to do")
    table.cleanup_checkpoints(timedelta(0))
    table.cleanup_old_versions(timedelta(0), delete_unverified=True)
    assert stored(table) == expected(1, 2, 4, 5, 6, 8)
    assert calls.taken() == []
    assert table.verify("b", run=True).ok


@every_version
def test_a_clause_keeps_the_other_blobs(local_db: Connection, calls: Calls, version: str) -> None:
    table = make_table(local_db, [8], storage_version=version)
    table.add_columns({"b": blob_udf(calls)})
    table.backfill("b", where="id < 4")
    assert stored(table) == {**expected(*range(4)), **dict.fromkeys(range(4, 8))}
    table.backfill("b")
    assert (calls.taken(), stored(table)) == ([*range(8)], expected(*range(8)))


@every_version
def test_the_type_is_the_formats(local_db: Connection, calls: Calls, version: str) -> None:
    """However it is declared: by Lance's mark, by its type, or by a field of that."""
    table = make_table(local_db, [2], storage_version=version)
    declared = {
        "marked": blob_udf(calls, field_metadata={**MARK, "unit": "png"}),
        "typed": blob_udf(calls, data_type=BlobType(), field_metadata={}),
        "field": blob_udf(calls, data_type=lance.blob_field("x"), field_metadata=None),
    }
    table.add_columns(declared)
    for name in declared:
        table.backfill(name)
        field = table.schema.field(name)
        if version == "2.2":
            assert isinstance(field.type, BlobType)
        else:
            assert field.type == pa.large_binary()
            assert field.metadata[b"lance-encoding:blob"] == b"true"
        assert stored(table, name) == expected(0, 1)
    assert table.schema.field("marked").metadata[b"unit"] == b"png"
    assert table.stored_functions()[0].column == "marked"


def of_arrays(id: pa.Array) -> pa.Array:
    return pa.array([content(i) for i in id.to_pylist()], pa.binary())


def of_blob_arrays(id: pa.Array) -> pa.Array:
    return lance.blob_array([content(i) for i in id.to_pylist()])


def of_batches(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([content(i) for i in batch["id"].to_pylist()], pa.large_binary())


@pytest.mark.parametrize("function", [of_arrays, of_blob_arrays, of_batches])
def test_kinds_of_functions(local_db: Connection, calls: Calls, function: Any) -> None:
    table = make_table(local_db, [5])
    table.add_columns({"b": blob_udf(calls, function, input_columns=["id"])})
    table.backfill("b")
    assert stored(table) == expected(*range(5))


@every_version
@pytest.mark.parametrize(
    "blob",
    [pa.field("b", pa.large_binary(), metadata=MARK), lance.blob_field("b")],
    ids=["marked", "typed"],
)
def test_a_blob_beside_other_columns(
    local_db: Connection, calls: Calls, version: str, blob: pa.Field
) -> None:
    """One call gives several columns, of which one is a blob."""

    def both(batch: pa.RecordBatch) -> pa.RecordBatch:
        values = of_batches(batch)
        return pa.record_batch({"size": pc.binary_length(values), "b": values})

    table = make_table(local_db, [4, 1], storage_version=version)
    schema = pa.schema([pa.field("size", pa.int64()), blob])
    table.add_columns(counted(calls, both, output_schema=schema, input_columns=["id"]))
    table.backfill("b")
    assert stored(table) == expected(*range(5))
    sizes = table.to_lance().to_table(columns=["size"])["size"].to_pylist()
    assert sizes == [*SIZES, None]
    calls.clear()
    table.drop_columns(["size"])
    assert str(table.backfill("b")).startswith("DONE: nothing to do")
    assert stored(table) == expected(*range(5))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("text", "'text'"),
        ({"uri": "s3://bucket/x"}, "uri"),
        (lance.blob_array(["file:///etc/hosts"]), "bytes of their own"),
    ],
)
def test_what_is_no_blob_is_refused(local_db: Connection, returned: Any, message: str) -> None:
    def bad(id: pa.Array) -> pa.Array:
        return returned

    def bad_row(id: int) -> bytes:
        return returned  # type: ignore[no-any-return]

    function = bad if isinstance(returned, pa.Array) else bad_row
    table = make_table(local_db, [1])
    table.add_columns({"b": geneva.udf(function, data_type=BlobType())})
    with pytest.raises(UDFOutputError, match=message):
        table.backfill("b")


def test_blobs_inside_of_something_are_refused(local_db: Connection) -> None:
    table = make_table(local_db, [1])
    inside = pa.struct([pa.field("b", pa.large_binary(), metadata=MARK)])
    for kind in (inside, pa.list_(BlobType())):
        with pytest.raises(InvalidUDFError, match="blobs inside of it"):
            table.add_columns({"b": geneva.udf(lambda id: None, data_type=kind)})
    with pytest.raises(InvalidUDFError, match=r"data_type=pa.large_binary\(\)"):
        table.add_columns(
            {"b": geneva.udf(lambda id: "", data_type=pa.string(), field_metadata=MARK)}
        )


@every_version
def test_rows_that_failed_are_known(
    local_db: Connection, calls: Calls, tmp_path: Path, version: str
) -> None:
    broken = str(tmp_path / "broken")
    Path(broken).touch()

    def fragile(id: int) -> bytes | None:
        if id == 2 and Path(broken).exists():
            raise ValueError("no picture")
        return content(id)

    table = make_table(local_db, [4], storage_version=version)
    table.add_columns({"b": blob_udf(calls, fragile, on_error=skip_on_error())})
    assert table.backfill("b").rows_failed == 1
    assert stored(table) == {**expected(0, 1, 3), 2: None}
    calls.clear()
    assert str(table.backfill("b")).startswith("DONE: nothing to do")
    Path(broken).unlink()
    table.backfill("b", retry_failed=True)
    assert (calls.taken(), stored(table)) == ([2], expected(*range(4)))


@every_version
def test_a_blob_that_changed_is_an_input_that_changed(
    local_db: Connection, calls: Calls, version: str
) -> None:
    """Also of format 2.2, where Lance counts fields below a blob that no data file lists."""
    table = make_table(local_db, [3], storage_version=version)
    table.add_columns({"b": blob_udf(Calls(f"{calls.path}-b"))})
    table.add_columns({"n": counted(calls, size_of, input_columns=["b"], data_type=pa.int64())})
    table.backfill("n")
    calls.clear()
    other = blob_udf(Calls(f"{calls.path}-b"), lambda id: b"other" if id == 1 else content(id))
    table.alter_columns({"path": "b", "udf": other})
    table.backfill("b")
    table.backfill("n")
    assert calls.count == 1, "for the blob that is another one"
    assert table.to_lance().to_table(columns=["n"])["n"].to_pylist() == [0, 5, 70_000]


def size_of(b: bytes | None) -> int:
    return len(b or b"")


@every_version
def test_others_change_the_table_meanwhile(
    local_db: Connection, calls: Calls, version: str
) -> None:
    table = make_table(local_db, [2, 2], storage_version=version, stable_row_ids=True)
    table.add_columns({"b": blob_udf(calls)})
    changed = []

    def compact_first(*job: Any) -> Any:
        if not changed:
            changed.append(local_db.open_table("t").compact_files())
        return publish_columns(*job)

    with publishing(local_db, compact_first):
        table.backfill("b")
    assert stored(table) == expected(*range(4))
    assert table.verify("b", run=True).ok


def test_what_a_crash_left_is_removed_with_its_blobs(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [4, 4])
    table.add_columns({"b": blob_udf(calls)})
    table.backfill("b", where="id < 4")
    kept = {path for path in Path(table.ref.uri, "data").rglob("*") if path.is_file()}

    def fail(*_: Any) -> Any:
        raise OSError("the driver is gone")

    with publishing(local_db, fail), pytest.raises(OSError, match="gone"):
        table.backfill("b")
    left = {path for path in Path(table.ref.uri, "data").rglob("*") if path.is_file()}
    assert any(path.suffix == ".blob" for path in left - kept)
    for path in left - kept:
        if path.suffix == ".lance":
            path.unlink()  # as if it had died before the file was whole
    table.cleanup_checkpoints(timedelta(0))
    assert {path for path in Path(table.ref.uri, "data").rglob("*") if path.is_file()} == kept
    assert stored(table) == {**expected(*range(4)), **dict.fromkeys(range(4, 8))}
    table.backfill("b")
    assert stored(table) == expected(*range(8))


@pytest.mark.parametrize("kind", [pa.large_binary(), BlobType()])
def test_a_view_computes_blobs_and_carries_them(
    local_db: Connection, calls: Calls, kind: pa.DataType
) -> None:
    table = make_table(local_db, [4], stable_row_ids=True)
    table.add_columns({"b": blob_udf(Calls(f"{calls.path}-b"))})
    table.backfill("b")

    def head(b: BlobFile | None) -> bytes | None:
        return None if b is None else b.read(1_000_000)

    mark = {} if kind == BlobType() else MARK
    made = counted(calls, head, data_type=kind, field_metadata=mark, input_columns=["b"])
    query = table.query().select({"id": "id", "b": "b", "head": made})
    assert query.to_arrow()["head"].to_pylist()[3] == content(3)[:1_000_000]  # type: ignore[index]
    calls.clear()
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert stored(view) == expected(*range(4))
    assert stored(view, "head") == {i: c and c[:1_000_000] for i, c in expected(*range(4)).items()}
    assert calls.count == 4
    table.update(where="id = 1", values={"id": 6})
    table.backfill("b")
    view.refresh()
    assert stored(view) == expected(0, 2, 3, 6)
    assert calls.count == 5, "and for the one whose blob is another one"


@pytest.mark.s3
def test_blobs_in_an_object_store(bucket: Bucket, calls: Calls) -> None:
    db = geneva.connect(
        bucket.uri, storage_options=bucket.storage_options, runner=lambda: InProcessRunner(2)
    )
    table = db.create_table("t", pa.table({"id": range(5)}))
    table.add_columns({"b": blob_udf(calls)})
    table.backfill("b")
    assert stored(table) == expected(*range(5))
    assert [key for key in bucket.keys("t.lance/data") if key.endswith(".blob")]


@pytest.mark.spark
@pytest.mark.slow
def test_on_spark(tmp_path: Path, calls: Calls) -> None:
    table = make_table(connect(tmp_path / "db", None), [5, 3])
    table.add_columns({"b": blob_udf(calls)})
    table.backfill("b")
    assert stored(table) == expected(*range(8))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_large_blobs_are_written_one_by_one(tmp_path: Path, version: str) -> None:
    """300 MB each: memory is a matter of one of them, however many there are."""
    code = f"""
        import json, resource, lance, pyarrow as pa, geneva
        from geneva.config import Settings
        from geneva.execution.runner import InProcessRunner

        quiet = Settings(progress=False)
        db = geneva.connect("db", runner=lambda: InProcessRunner(1), settings=quiet)
        rows, version = pa.table({{"id": [1, 2]}}), {version!r}
        lance.write_dataset(rows, f"{{db.uri}}/t.lance", data_storage_version=version)
        table = db.open_table("t")

        @geneva.udf(data_type=pa.large_binary(), field_metadata={MARK!r})
        def large(id: int) -> bytes:
            return bytes([id]) * 300_000_000

        table.add_columns({{"b": large}})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        table.backfill("b")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        ends = [blob.read_range(299_999_999, 1)[0] for blob in table.take_blobs([0, 1], "b")]
        print(json.dumps([used * 1024, ends]))
        """
    used, ends = json.loads(finish(start_script(tmp_path, code, RUST_LOG="error"), 280))
    assert ends == [1, 2]
    assert used < 6 * 300_000_000
