"""Blobs in views: carried over they are blobs, and functions give some."""

from __future__ import annotations

import pyarrow as pa
import pytest

from geneva import Connection, Table, udf
from geneva.errors import InvalidUDFError, UserInputError
from geneva.udf.chunker import chunker
from support import Calls, counted
from view_support import STABLE

BLOB = {"lance-encoding:blob": "true"}
SCHEMA = pa.schema([("id", pa.int64()), pa.field("image", pa.large_binary(), metadata=BLOB)])


def image(i: int) -> bytes | None:
    return None if i % 5 == 4 else bytes([i]) * (100_000 if i == 1 else i)


def rows(start: int, stop: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    found = [{"id": i, "image": image(i)} for i in range(start, stop)]
    return pa.Table.from_pylist(found, schema)


@pytest.fixture(params=["2.0", "2.1", "2.2"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(local_db: Connection, version: str) -> Table:
    options = {**STABLE, "new_table_data_storage_version": version}
    return local_db.create_table("src", rows(0, 6), storage_options=options)


def blobs(view: Table, column: str = "image") -> list[bytes | None]:
    """What `take_blobs` gives for all rows."""
    found = view.take_blobs(range(len(view)), column)
    return [blob.readall() if blob is not None else None for blob in found]


def ids(view: Table) -> list[int]:
    found: list[int] = view.to_arrow()["id"].to_pylist()
    return found


def test_a_carried_blob_is_a_blob(local_db: Connection, source: Table, calls: Calls) -> None:
    size = counted(calls, lambda image: len(image or b""), data_type=pa.int64())
    query = source.query().select(["id", "image"]).add_column({"size": (size, ["image"])})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert blobs(view) == [image(i) for i in range(6)]
    assert view.schema.field("image").metadata[b"lance-encoding:blob"] == b"true"
    assert view.to_arrow()["size"].to_pylist() == [len(image(i) or b"") for i in range(6)]
    # As time goes by: rows come, go and change, and the view is compacted.
    source.add(rows(6, 9))
    source.delete("id = 0")
    source.update(where="id = 2", values={"id": 22})
    view.refresh()
    for _ in range(2):
        wanted = {22 if i == 2 else i: image(i) for i in range(1, 9)}
        assert dict(zip(ids(view), blobs(view), strict=True)) == wanted
        view.compact_files()
    calls.clear()
    assert view.refresh().rows_computed == 0
    assert calls.count == 0


def test_a_view_of_a_view(local_db: Connection, source: Table) -> None:
    first = local_db.create_materialized_view("v", source.query())
    first.refresh()
    second = local_db.create_materialized_view("w", first.query().where("id < 3"))
    second.refresh()
    assert blobs(second) == [image(i) for i in range(3)]


def test_a_renamed_copy(local_db: Connection, source: Table) -> None:
    view = local_db.create_materialized_view("v", source.query().select({"id": "id", "p": "image"}))
    view.refresh()
    assert blobs(view, "p") == [image(i) for i in range(6)]


def test_in_a_chunked_view(local_db: Connection, source: Table) -> None:
    twice = chunker(
        lambda id: [{"n": 10 * id}, {"n": 10 * id + 1}],
        output_schema=pa.schema([("n", pa.int64())]),
    )
    view = local_db.create_materialized_view("v", source.query().add_column({"two": twice}))
    view.refresh()
    found = zip(ids(view), blobs(view), strict=True)
    assert sorted(found, key=lambda p: p[0]) == [(i, image(i)) for i in range(6) for _ in "12"]


def test_beside_a_column_that_the_format_of_blobs_lacks(local_db: Connection) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    schema = pa.schema([*SCHEMA, pa.field("m", kind)])
    data = rows(0, 3).append_column("m", pa.array([[("k", i)] for i in range(3)], kind))
    source = local_db.create_table("src", data.cast(schema), storage_options=STABLE)
    view = local_db.create_materialized_view("v", source.query())
    view.refresh()
    assert view.to_arrow().to_pylist() == [
        {"id": i, "image": image(i), "m": [("k", i)]} for i in range(3)
    ]


def test_blobs_inside_a_struct_are_taken_by_their_path(local_db: Connection) -> None:
    kind = pa.struct([pa.field("n", pa.int64()), SCHEMA.field("image")])
    data = pa.Table.from_pylist(
        [{"s": {"n": i, "image": image(i)}} for i in range(3)], pa.schema([("s", kind)])
    )
    source = local_db.create_table("src", data, storage_options=STABLE)
    for refused in (source.query(), source.query().select({"t": "s"})):
        with pytest.raises(UserInputError, match=r"blobs inside .* select\(\{\"name\": \"s.field"):
            local_db.create_materialized_view("v", refused)
        with pytest.raises(UserInputError, match="blobs inside"):
            refused.to_arrow()
    query = source.query().select({"n": "s.n", "image": "s.image"})
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert blobs(view) == [image(i) for i in range(3)]


def test_a_query_gives_bytes(source: Table) -> None:
    assert source.query().to_arrow()["image"].to_pylist() == [image(i) for i in range(6)]


def test_a_function_can_not_give_blobs_inside_of_something(
    local_db: Connection, source: Table
) -> None:
    inside = pa.struct([pa.field("b", pa.large_binary(), metadata=BLOB)])
    made = udf(lambda id: {"b": b"x"}, data_type=inside)
    with pytest.raises(InvalidUDFError, match=r"'b' can't be of type .* blobs inside of it"):
        source.query().add_column({"b": made})
    with pytest.raises(InvalidUDFError, match=r"'b' can't be of type .* blobs inside of it"):
        source.query().select({"b": made})
