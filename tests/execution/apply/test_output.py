"""What a function returns is checked before it is stored; the error says where and why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, JobStatus, udf
from geneva.errors import UDFError, UDFExecutionError, UDFOutputError
from geneva.execution.apply.batch import Applier
from support import Calls, checkpoint_ranges, column, counted, make_table

BAD = 5


def scalar(bad: Any, good: Any) -> Callable[[int], Any]:
    return lambda id: bad if id == BAD else good


WRONG_VALUES = [
    (pa.int64(), "text", 1, "str"),
    (pa.int64(), 1.5, 1, "float"),
    (pa.int8(), 1_000, 1, "int"),
    (pa.string(), 7, "a", "int"),
    (pa.float32(), "x", 1.0, "str"),
    (pa.list_(pa.float32(), 3), [1.0, 2.0], [1.0, 2.0, 3.0], "list"),
    (pa.list_(pa.int64()), 3, [1], "int"),
    (pa.struct([("a", pa.int64())]), {"b": 1}, {"a": 1}, "dict"),
    (pa.timestamp("us"), "2026", None, "str"),
    (pa.bool_(), "yes", True, "str"),
]


class TestWhereItIsSaid:
    @pytest.mark.parametrize(
        ("kind", "bad", "good", "shown"), WRONG_VALUES, ids=lambda v: str(v)[:20]
    )
    def test_a_value_of_another_type_or_width(
        self, local_db: Connection, calls: Calls, kind: pa.DataType, bad: Any, good: Any, shown: str
    ) -> None:
        table = make_table(local_db, [4, 4])
        table.add_columns({"x": counted(calls, scalar(bad, good), data_type=kind)})
        with pytest.raises(UDFOutputError) as caught:
            table.backfill("x", task_size=4)
        said = str(caught.value)
        for part in ("Table 't'", "column 'x'", "fragment 1", "row 1", shown, str(kind)):
            assert part in said
        record = local_db.list_jobs()[0]
        assert record.status is JobStatus.FAILED
        assert "fragment 1" in (record.error or "")
        assert BAD in calls.rows

    def test_on_every_runner(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [4, 4])
        table.add_columns({"x": counted(calls, scalar("text", 1), data_type=pa.int64())})
        with pytest.raises(UDFOutputError, match=r"Table 't', column 'x', fragment 1, row 1"):
            table.backfill("x", task_size=4, concurrency=1)
        assert calls.rows.count(BAD) == 1, "a wrong value is not tried again"

    def test_a_forbidden_null(self, db: Connection, calls: Calls) -> None:
        never = counted(calls, scalar(None, 1), data_type=pa.int64(), nullable=False)
        table = make_table(db, [8])
        table.add_columns({"x": never})
        with pytest.raises(UDFOutputError, match=r"fragment 0, row 5 .*nullable=False"):
            table.backfill("x", task_size=100, checkpoint_size=1)
        assert calls.rows == [0, 1, 2, 3, 4, 5]
        assert checkpoint_ranges(table)[0] == [(i, i + 1) for i in range(5)]

    @pytest.mark.parametrize("difference", [-1, 1])
    def test_too_few_or_too_many(self, db: Connection, calls: Calls, difference: int) -> None:
        def odd(id: pa.Array) -> pa.Array:
            return pa.array([1] * (len(id) + difference), pa.int64())

        table = make_table(db, [6])
        table.add_columns({"x": counted(calls, odd, data_type=pa.int64(), batch_size=3)})
        with pytest.raises(UDFOutputError) as caught:
            table.backfill("x", task_size=100)
        said = str(caught.value)
        assert f"returned {3 + difference} values for a batch of 3 rows" in said
        assert "Table 't', column 'x', fragment 0, rows [0, 3)" in said
        assert calls.count == 1

    def test_an_array_of_another_type(self, db: Connection, calls: Calls) -> None:
        def wide(id: pa.Array) -> pa.Array:
            return pa.array([0.5] * len(id), pa.float64())

        table = make_table(db, [3])
        table.add_columns({"x": counted(calls, wide, data_type=pa.float32())})
        with pytest.raises(UDFOutputError, match="array of double"):
            table.backfill("x", task_size=100)
        assert column(table, "x") == [None] * 3
        assert calls.count == 1

    def test_rows_are_physical_offsets(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [8])
        table.delete("id IN (1, 2)")
        table.add_columns({"x": counted(calls, scalar("text", 1), data_type=pa.int64())})
        with pytest.raises(UDFOutputError, match="fragment 0, row 5"):
            table.backfill("x", task_size=100)
        assert calls.count == 6


class TestExceptions:
    def test_the_users_exception_is_told_with_its_place(self, db: Connection, calls: Calls) -> None:
        def fails(id: int) -> int:
            return 1 // (BAD - id)

        table = make_table(db, [4, 4])
        table.add_columns({"x": counted(calls, fails)})
        with pytest.raises(UDFExecutionError) as caught:
            table.backfill("x", task_size=4, concurrency=1)
        said = str(caught.value)
        for part in ("Table 't'", "column 'x'", "fragment 1", "row 1", "'fails'"):
            assert part in said
        assert "ZeroDivisionError" in said
        assert calls.rows.count(BAD) == 1
        assert isinstance(caught.value, UDFError)

    def test_a_type_error_is_told_as_the_seed_does(self, db: Connection, calls: Calls) -> None:
        def my_udf(id: int) -> float:
            return id + "text"  # type: ignore[operator]

        table = make_table(db, [3])
        table.add_columns({"x": counted(calls, my_udf, data_type=pa.float32())})
        with pytest.raises(UDFExecutionError) as caught:
            table.backfill("x", task_size=100)
        said = str(caught.value)
        for part in (
            "UDF 'my_udf' failed with type error: ",
            "Input batch schema: id: int64",
            "UDF expects input_columns: ['id']",
            "UDF output type: float",
        ):
            assert part in said
        assert calls.count == 1


NAIVE = datetime.fromisoformat("2024-01-01T05:00")
ZONED = NAIVE.replace(tzinfo=timezone(timedelta(hours=2)))
MIXED: list[tuple[pa.DataType, list[Any]]] = [
    (pa.date32(), [date(2024, 1, 1), NAIVE]),
    (pa.timestamp("us"), [NAIVE, ZONED]),
    (pa.binary(), ["é", b"b"]),
    (pa.time64("us"), [time(1), time(2, tzinfo=UTC)]),
    (pa.list_(pa.date32()), [[date(2024, 1, 1)], [NAIVE]]),
    (pa.int64(), [1, True]),
    (pa.float64(), [1.5, 2]),
    (pa.string(), ["a", None]),
]


@pytest.mark.parametrize(("kind", "given"), MIXED, ids=lambda v: str(v)[:20])
def test_objects_in_arrays_are_looked_at_as_those_in_lists(
    kind: pa.DataType, given: list[Any]
) -> None:
    def outcome(returned: Any) -> Any:
        def function(x: pa.Array) -> Any:
            return returned

        declared = udf(function, data_type=kind)
        try:
            return Applier(declared, pa.field("y", kind)).apply(pa.record_batch({"x": [1, 2]}))
        except UDFError as error:
            return type(error)

    array = np.empty(2, dtype=object)
    array[:] = given
    assert outcome(array) == outcome(given)


def test_a_column_of_one_is_to_be_made_flat() -> None:
    @udf(data_type=pa.float32())
    def means(x: pa.Array) -> Any:
        return np.ones((len(x), 1), np.float32)

    with pytest.raises(UDFOutputError, match=r"shape \(2, 1\).*\.squeeze\(1\)"):
        Applier(means, pa.field("y", pa.float32())).apply(pa.record_batch({"x": [1, 2]}))


def test_a_tensor_is_told_how_to_convert_it() -> None:
    torch = pytest.importorskip("torch")

    @udf(data_type=pa.list_(pa.float32(), 2))
    def doubles(x: pa.Array) -> Any:
        return torch.ones(len(x), 2, dtype=torch.float64)

    kind = pa.list_(pa.float32(), 2)
    with pytest.raises(UDFOutputError, match=r"a tensor of torch.float64.*\.to\(torch.float32\)"):
        Applier(doubles, pa.field("y", kind)).apply(pa.record_batch({"x": [1, 2]}))


NULS = ["a\0b", "a\0c", "", "\0d"]


@pytest.mark.parametrize(
    ("kind", "made", "values"),
    [
        (pa.string(), np.array(NULS), NULS),
        (pa.large_binary(), np.array([v.encode() for v in NULS]), [v.encode() for v in NULS]),
        (pa.list_(pa.string(), 2), np.array([NULS, NULS]).T, [[v, v] for v in NULS]),
        (pa.list_(pa.string()), [np.array([v]) for v in NULS], [[v] for v in NULS]),
        (pa.string(), np.ma.array(NULS, mask=[0, 1, 0, 0]), [NULS[0], None, *NULS[2:]]),
        (pa.dictionary(pa.int32(), pa.string()), np.array(NULS), NULS),
    ],
)
def test_texts_are_not_ended_by_nul_characters(kind: pa.DataType, made: Any, values: Any) -> None:
    @udf(data_type=kind)
    def texts(x: pa.Array) -> Any:
        return made

    @udf(data_type=kind)
    def one(x: int) -> Any:
        return made[x]

    batch = pa.record_batch({"x": range(4)})
    for function in (texts, one):
        assert Applier(function, pa.field("v", kind)).apply(batch).to_pylist() == values
