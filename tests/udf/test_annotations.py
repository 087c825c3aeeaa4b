"""Annotations that are texts, and name what only the function around them knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import pytest

from geneva import Columns, chunker, udf, udtf
from geneva.errors import InvalidUDFError, TypeMismatchError
from geneva.udf.declare import UDF, UDFArgType, resolve_inputs

if TYPE_CHECKING:
    import pyarrow as nowhere
    from pyarrow import RecordBatch


class Box(NamedTuple):
    """Another one than those of the functions below."""

    wrong: bytes


def test_names_of_the_function_around_are_known() -> None:
    import pyarrow as arrow

    class Part(TypedDict):
        n: int

    class Box(TypedDict):
        a: int
        part: Part

    @udf(data_type=arrow.int64())
    def arrays(x: arrow.Array) -> arrow.Array:
        return x

    @udf(data_type=arrow.int64())
    def batches(rows: arrow.RecordBatch) -> arrow.Array:
        return rows

    @udf
    class Made:
        def __call__(self, x: arrow.Int64Array) -> arrow.Int64Array:
            return x

    @udf
    def box(x: int) -> Box: ...

    @udf
    def several(x: int) -> Columns[Box]: ...

    @chunker
    def boxes(x: int) -> Iterator[Box]: ...

    @udtf(output_schema=arrow.schema([("a", arrow.int64())]))
    def table(rows: arrow.Table) -> arrow.Table: ...

    struct = arrow.struct([("a", arrow.int64()), ("part", arrow.struct([("n", arrow.int64())]))])
    assert arrays.arg_type is Made.arg_type is UDFArgType.ARRAY
    assert (batches.arg_type, batches.input_columns) == (UDFArgType.RECORD_BATCH, None)
    assert box.data_type == several.data_type == struct, "and not the module's Box"
    assert boxes.output_schema == arrow.schema(struct)
    assert table.output_schema.names == ["a"]


def _made_inside() -> tuple[UDF, UDF]:
    import pyarrow as arrow

    def inner() -> tuple[UDF, UDF]:
        number = float

        @udf(data_type=arrow.int64())
        def of_texts(x: arrow.StringArray) -> arrow.Array:
            return x

        @udf(data_type=arrow.int64())
        def of_lists(x: list[number]) -> int:  # type: ignore[valid-type]
            return len(x)

        return of_texts, of_lists

    return inner()


def test_they_are_kept_when_the_function_around_has_ended() -> None:
    import pyarrow as pa

    of_texts, of_lists = _made_inside()
    assert (of_texts.arg_type, of_lists.python_inputs) == (UDFArgType.ARRAY, (list,))
    number = str  # noqa: F841  no name of theirs
    resolve_inputs(of_texts, pa.schema({"x": pa.string()}))
    resolve_inputs(of_lists, pa.schema({"x": pa.list_(pa.float64())}))
    for made, kind in ((of_texts, pa.int64()), (of_lists, pa.list_(pa.string()))):
        with pytest.raises(TypeMismatchError):
            resolve_inputs(made, pa.schema({"x": kind}))


class TestNamesOfAClassBody:
    import pyarrow as arrow

    @udf(data_type="int64")
    def arrays(x: arrow.Array) -> arrow.Array:
        return x

    def test_are_known(self) -> None:
        assert self.arrays.arg_type is UDFArgType.ARRAY


def _of_nothing(x: nowhere.Array) -> nowhere.Array: ...
def _of_a_batch(rows: RecordBatch | None): ...
def _of_nothing_fed(x: int, y: nowhere.Array = None) -> int: ...


class _Called:
    def __call__(self, x: nowhere.ChunkedArray): ...


@pytest.mark.parametrize("function", [_of_nothing, _of_a_batch, _Called])
def test_nobody_guesses_whether_a_batch_is_meant(function: Any) -> None:
    with pytest.raises(InvalidUDFError, match=r"can't be resolved here.*one value or a batch"):
        udf(function, data_type="int64")
    assert udf(_of_nothing_fed).arg_type is UDFArgType.SCALAR
