"""Functions of every kind, fed from every kind of column, on every runner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.blob import BlobFile

import geneva
from geneva import Connection, Table, udf
from geneva.errors import TypeMismatchError
from geneva.model.rows import RowRange
from geneva.storage.lance.dataset import open_dataset
from geneva.storage.lance.fragments import fitting_window
from support import Calls, column, connect, counted, make_table

FACTOR = 3


def helper(value: int) -> int:
    return value * FACTOR


class TestKinds:
    @pytest.fixture
    def table(self, db: Connection) -> Table:
        data = pa.table({"id": pa.array(range(5), pa.int64()), "b": [10, 20, 30, 40, 50]})
        return make_table(db, [data.slice(0, 3), data.slice(3)])

    def test_scalar_with_a_helper_and_a_global(self, table: Table, calls: Calls) -> None:
        def uses_helper(id: int) -> int:
            return helper(id)

        table.add_columns({"x": counted(calls, uses_helper)})
        table.backfill("x")
        assert column(table, "x") == [0, 3, 6, 9, 12]
        assert calls.batches == [1] * 5

    def test_several_inputs(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": counted(calls, lambda id, b: id + b, data_type=pa.int64())})
        table.backfill("x")
        assert column(table, "x") == [10, 21, 32, 43, 54]
        assert calls.rows == [0, 1, 2, 3, 4]

    def test_renamed_inputs_go_by_position(self, table: Table, calls: Calls) -> None:
        minus = counted(calls, lambda p, q: p - q, data_type=pa.int64())
        table.add_columns({"x": (minus, ["b", "id"]), "y": (minus, ["id", "b"])})
        table.backfill("x")
        table.backfill("y")
        assert column(table, "x") == [10, 19, 28, 37, 46]
        assert column(table, "y") == [-10, -19, -28, -37, -46]
        assert calls.count == 10

    def test_one_column_twice(self, table: Table, calls: Calls) -> None:
        product = counted(calls, lambda p, q: p * q, data_type=pa.int64())
        table.add_columns({"x": (product, ["id", "id"])})
        table.backfill("x")
        assert column(table, "x") == [0, 1, 4, 9, 16]
        assert calls.count == 5

    def test_arrays(self, table: Table, calls: Calls) -> None:
        def added(id: pa.Array, b: pa.Array) -> pa.Array:
            return pc.add(id, b)

        table.add_columns({"x": counted(calls, added, data_type=pa.int64(), batch_size=2)})
        table.backfill("x", task_size=100)
        assert column(table, "x") == [10, 21, 32, 43, 54]
        assert sorted(calls.batches) == [1, 2, 2]

    def test_record_batches(self, table: Table, calls: Calls) -> None:
        def added(batch: pa.RecordBatch) -> pa.Array:
            assert batch.schema.names == ["id", "b"]
            return pc.add(batch["id"], batch["b"])

        options = {"data_type": pa.int64(), "input_columns": ["id", "b"], "batch_size": 3}
        table.add_columns({"x": counted(calls, added, **options)})
        table.backfill("x", task_size=100)
        assert column(table, "x") == [10, 21, 32, 43, 54]
        assert sorted(calls.batches) == [2, 3]

    def test_batch_functions_see_only_the_selected_rows(self, table: Table, calls: Calls) -> None:
        def negated(id: pa.Array) -> pa.Array:
            return pc.negate(id)

        table.add_columns({"x": counted(calls, negated, data_type=pa.int64())})
        table.backfill("x", where="id IN (0, 2, 4)")
        assert column(table, "x") == [0, None, -2, None, -4]
        assert calls.rows == [0, 2, 4]

    def test_closures_and_lambdas(self, table: Table, calls: Calls) -> None:
        for offset in (100, 200):
            shifted = counted(calls, lambda id, by=offset: id + by, data_type=pa.int64())
            table.add_columns({f"plus_{offset}": shifted})
            table.backfill(f"plus_{offset}")
        assert column(table, "plus_100") == [100, 101, 102, 103, 104]
        assert column(table, "plus_200") == [200, 201, 202, 203, 204]
        assert calls.count == 10

    def test_a_decorated_function_stays_callable(self, table: Table, calls: Calls) -> None:
        @udf(data_type=pa.int64())
        def square(id: int) -> int:
            return id * id

        assert square(7) == 49
        table.add_columns({"x": square})
        result = table.backfill("x")
        assert column(table, "x") == [square(i) for i in range(5)]
        assert result.rows_computed == 5


class TestCallableClasses:
    def test_constructed_once_a_worker_process(
        self, db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        made = Calls(str(tmp_path / "made"))

        class Model:
            def __init__(self, factor: int) -> None:
                self.factor = factor
                self.ready = False

            def setup(self) -> None:
                made.note([os.getpid()])
                self.ready = True

            def __call__(self, id: int) -> int:
                assert self.ready
                calls.note([id])
                return id * self.factor

        table = make_table(db, [3] * 6)
        table.add_columns({"x": udf(Model, data_type=pa.int64())(5)})
        assert made.count == 0, "declaring constructs nothing"
        table.backfill("x", task_size=3)
        assert column(table, "x") == [5 * i for i in range(18)]
        assert calls.rows == list(range(18))
        assert len(set(made.rows)) == made.count, "once a process"
        assert 1 <= made.count <= 2
        before = made.count
        table.add(pa.table({"id": [50]}))
        table.backfill("x")
        assert made.count <= max(before, 2), "and not again for the next job, by the same workers"

    def test_closed_when_the_worker_needs_the_room(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        closed = Calls(str(tmp_path / "closed"))

        class Closing:
            def __init__(self, name: int) -> None:
                self.name = name

            def __call__(self, id: int) -> int:
                calls.note([id])
                return id

            def close(self) -> None:
                closed.note([self.name])

        table = make_table(local_db, [1])
        declared = udf(Closing, data_type=pa.int64())
        for name in range(6):
            table.add_columns({f"c{name}": declared(name)})
            table.backfill(f"c{name}")
        assert closed.rows == [0, 1], "four are kept alive"
        assert calls.count == 6


class TestInputs:
    @pytest.fixture
    def table(self, db: Connection) -> Table:
        data = pa.table(
            {
                "id": pa.array([0, 1, 2], pa.int64()),
                "deep": pa.array([{"a": {"b": i, "c": f"t{i}"}, "n": i * 10} for i in range(3)]),
                "vector": pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
                "ragged": pa.array([[1], [2, 3], []], pa.list_(pa.int64())),
                "words": [["a", "b"], [], None],
            }
        )
        return make_table(db, [data])

    def test_dotted_paths_into_structs(self, table: Table, calls: Calls) -> None:
        join = counted(calls, lambda p, q, r: f"{p}{q}{r}", data_type=pa.string())
        table.add_columns({"x": (join, ["deep.a.b", "deep.a.c", "deep.n"])})
        table.backfill("x")
        assert column(table, "x") == ["0t00", "1t110", "2t220"]
        assert calls.rows == [0, 1, 2]

    def test_a_struct_as_a_dict(self, table: Table, calls: Calls) -> None:
        table.add_columns({"x": counted(calls, lambda deep: deep["a"]["b"], data_type="int64")})
        table.backfill("x")
        assert column(table, "x") == [0, 1, 2]
        assert calls.count == 3

    def test_lists_of_numbers_as_numpy(self, table: Table, calls: Calls) -> None:
        def norm(vector: np.ndarray, ragged: np.ndarray) -> float | None:
            if vector is None:
                return None
            assert isinstance(vector, np.ndarray)
            assert vector.dtype == np.float32
            assert isinstance(ragged, np.ndarray)
            return float(vector.sum()) + float(ragged.sum())

        table.add_columns({"x": counted(calls, norm, data_type=pa.float64())})
        table.backfill("x")
        assert column(table, "x") == [4.0, 12.0, None]
        assert calls.count == 3

    def test_lists_of_text_as_lists(self, table: Table, calls: Calls) -> None:
        count = counted(calls, lambda words: len(words or []), data_type=pa.int32())
        table.add_columns({"x": count})
        table.backfill("x")
        assert column(table, "x") == [2, 0, 0]
        assert calls.count == 3


class TestBlobs:
    @pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_blob_inputs_arrive_as_bytes(
        self, local_db: Connection, calls: Calls, version: str, sparse: bool
    ) -> None:
        blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        schema = pa.schema([pa.field("id", pa.int64()), blob])
        images = [bytes([i % 256]) * (i + 1) for i in range(40)]
        data = pa.table(
            [pa.array(range(40), pa.int64()), pa.array(images, pa.large_binary())], schema=schema
        )
        table = make_table(local_db, [data], storage_version=version)
        table.add_columns({"x": counted(calls, lambda image: len(image), data_type=pa.int64())})
        table.backfill("x", where="id IN (3, 30)" if sparse else None)
        wanted = (3, 30) if sparse else range(40)
        assert column(table, "x") == [i + 1 if i in wanted else None for i in range(40)]
        assert calls.count == len(list(wanted))

    @pytest.mark.parametrize("version", ["2.0", "2.2"])
    @pytest.mark.parametrize("kind", ["plain", "async", "class"])
    def test_a_parameter_can_be_a_file(self, local_db: Connection, version: str, kind: str) -> None:
        table = make_table(local_db, [_blobs([b"0123456789", None, b""])], storage_version=version)

        def looked(image: BlobFile | None) -> str | None:
            if image is None:
                return None
            assert isinstance(image, BlobFile)
            assert image.seekable()
            with image:
                if image.size() == 0:
                    return repr(image.read())
                image.seek(-4, 2)
                found = [image.read(2), image.tell(), image.read_range(1, 3), image.read()]
                image.seek(0)
                target = bytearray(4)
                return repr([*found, image.readinto(target), bytes(target), image.readall()])

        async def looked_async(image: BlobFile | None) -> str | None:
            return looked(image)

        class Looked:
            def __call__(self, image: BlobFile | None) -> str | None:
                return looked(image)

        made = {"plain": looked, "async": looked_async, "class": Looked}[kind]
        table.add_columns({"x": udf(made, data_type=pa.string())})
        table.backfill("x")
        seen = repr([b"67", 8, b"123", b"89", 4, b"0123", b"456789"])
        assert column(table, "x") == [seen, None, "b''"]

    @pytest.mark.spark
    @pytest.mark.slow
    def test_a_large_file_on_spark(self, tmp_path: Path) -> None:
        table = make_table(connect(tmp_path / "db", None), [_blobs([b"x" * 200_000_000, b"y"])])

        def last(image: BlobFile) -> str:
            image.seek(-1, 2)
            return f"{image.size()} {image.read()!r}"

        table.add_columns({"x": udf(last)})
        table.backfill("x", concurrency=1)
        assert column(table, "x") == ["200000000 b'x'", "1 b'y'"]

    def test_a_chunker_and_a_preview_get_files_too(self, local_db: Connection) -> None:
        table = make_table(local_db, [_blobs([b"abcd", b"ef"])], stable_row_ids=True)

        def pieces(image: BlobFile) -> Iterator[dict[str, bytes]]:
            while piece := image.read(2):
                yield {"piece": piece}

        made = geneva.chunker(pieces, output_schema=pa.schema([("piece", pa.binary())]))
        assert table.preview(made).values.to_pylist()[0] == [{"piece": b"ab"}, {"piece": b"cd"}]
        view = local_db.create_udtf_view("v", source=table.query().select(["id"]), udtf=made)
        view.refresh()
        assert sorted(view.to_arrow()["piece"].to_pylist()) == [b"ab", b"cd", b"ef"]

    def test_a_file_is_of_bytes(self, local_db: Connection) -> None:
        def looked(id: BlobFile) -> int:
            return 1

        with pytest.raises(TypeMismatchError, match="'id' as BlobFile"):
            make_table(local_db, [3]).add_columns({"x": udf(looked)})

    @pytest.mark.parametrize("version", ["2.0", "2.2"])
    def test_large_blobs_are_read_one_by_one(self, local_db: Connection, version: str) -> None:
        sizes = [9_000_000, 10, 30_000_000, None]
        data = [None if size is None else b"x" * size for size in sizes]
        table = make_table(local_db, [_blobs(data)], storage_version=version)
        dataset, rows = open_dataset(table.ref), RowRange(0, 4)
        assert fitting_window(dataset, 0, ["id"], rows, 64) == 64
        assert fitting_window(dataset, 0, ["id", "image"], rows, 64) == 1

        def length(image: BlobFile | None) -> int:
            return -1 if image is None else image.size()

        table.add_columns({"x": udf(length)})
        table.backfill("x")
        assert column(table, "x") == [-1 if size is None else size for size in sizes]


def _blobs(values: list[bytes | None]) -> pa.Table:
    blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), blob])
    ids = pa.array(range(len(values)), pa.int64())
    return pa.table([ids, pa.array(values, pa.large_binary())], schema=schema)


def test_a_row_is_tried_again_with_the_values_that_it_has(local_db: Connection) -> None:
    data = pa.table({"v": pa.array([[1.0, 2.0, 3.0]] * 3, pa.list_(pa.float64()))})
    table = make_table(local_db, [data])
    tries: list[float] = []

    def last(v: list[float]) -> float:
        value = v.pop()
        tries.append(value)
        if len(tries) % 2:
            raise ValueError("once more")
        return value

    policy = geneva.Retry(max_attempts=3, backoff=0)
    table.add_columns({"x": udf(last, data_type=pa.float64(), on_error=policy)})
    table.backfill("x")
    assert column(table, "x") == [3.0] * 3
