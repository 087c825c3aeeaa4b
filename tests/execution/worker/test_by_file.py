"""Large results of a fragment that is soon done: its file stands for their checkpoints.

What a job leaves when it ends early is in checkpoints all the same, read back from the file.
"""

from __future__ import annotations

import decimal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geneva import UDF, Connection
from geneva.errors import UDFExecutionError
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker import column_file, pacing, writer
from geneva.model.rows import RowRange
from geneva.model.tables import TableRef
from geneva.on_error import skip_on_error
from geneva.planning import sizing
from geneva.storage.checkpoints.store import CheckpointKey, LanceCheckpointStore
from geneva.udf.types import holds_json, without_json
from support import Calls, by_id, column, connect, make_table
from support import counted as counted_by

ROWS, SIZE = 100, 5


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of checkpoints, as they are written."""
    rows: list[int] = []
    write = LanceCheckpointStore.__setitem__

    def note(store: LanceCheckpointStore, key: str, value: pa.RecordBatch) -> None:
        parsed = CheckpointKey.parse(key)
        if parsed is not None and parsed.rows is not None:
            rows.extend(range(parsed.rows.start, parsed.rows.end))
        write(store, key, value)

    monkeypatch.setattr(LanceCheckpointStore, "__setitem__", note)
    return rows


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are as many bytes as may be held."""
    monkeypatch.setattr(pacing, "MAX_UNSAVED_BYTES", 200)
    monkeypatch.setattr(writer, "MAX_UNSAVED_BYTES", 200)


def fails_at(broken: Path, row: int, value: Callable[[int], Any]) -> Callable[[int], Any]:
    """A function of ids that raises at one of them as long as a file is there."""
    path = str(broken)

    def fragile(id: int) -> Any:
        if id == row and Path(path).exists():
            raise ValueError("no")
        return value(id)

    return fragile


def counted(calls: Calls, function: Callable[..., Any], **options: Any) -> UDF:
    return counted_by(calls, function, batch_size=SIZE, **options)


def test_what_its_file_will_hold_is_in_no_checkpoint(
    local_db: Connection, calls: Calls, saved: list[int]
) -> None:
    table = make_table(local_db, [ROWS, ROWS])
    table.add_columns({"x": counted(calls, lambda id: id * 3, data_type="int64")})
    table.backfill("x")
    assert column(table, "x") == [3 * i for i in range(2 * ROWS)]
    assert calls.rows == list(range(2 * ROWS))
    assert saved == []


TYPES: list[tuple[str, pa.DataType, Callable[[int], Any]]] = [
    ("int64", pa.int64(), lambda id: None if id % 7 == 0 else id * 3),
    ("double", pa.float64(), lambda id: float("inf") if id % 7 == 0 else id / 3),
    ("string", pa.string(), lambda id: None if id % 7 == 0 else "ä🎈" * (id % 9)),
    ("large_binary", pa.large_binary(), lambda id: bytes([id]) * (id % 50)),
    ("bool", pa.bool_(), lambda id: id % 3 == 0),
    ("vector", pa.list_(pa.float32(), 8), lambda id: [float(id)] * 8),
    ("list", pa.list_(pa.int32()), lambda id: None if id % 7 == 0 else [id] * (id % 5)),
    (
        "struct",
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}),
        lambda id: None if id % 7 == 0 else {"a": id, "b": [str(id)] * (id % 3)},
    ),
    ("dictionary", pa.dictionary(pa.int32(), pa.string()), lambda id: f"v{id % 5}"),
    ("narrow", pa.dictionary(pa.int8(), pa.string()), lambda id: f"v{id % 5}"),
    ("decimal", pa.decimal128(9, 2), lambda id: decimal.Decimal(id) / 4),
    ("timestamp", pa.timestamp("us", "UTC"), lambda id: None if id % 7 == 0 else id * 10**9),
    ("null", pa.null(), lambda id: None),
    ("json", pa.json_(), lambda id: None if id % 7 == 0 else f'{{"a":{id}}}'),
    ("list of json", pa.list_(pa.json_()), lambda id: [f'{{"a":{id}}}'] * (id % 3)),
    ("struct of json", pa.struct({"j": pa.json_()}), lambda id: {"j": f'{{"a":{id}}}'}),
]


@pytest.mark.filterwarnings("ignore:Column 'x' of table 't' is of type dictionary")
@pytest.mark.parametrize(("kind", "value"), [t[1:] for t in TYPES], ids=[t[0] for t in TYPES])
@pytest.mark.parametrize("where", [None, "id % 3 <> 1"])
def test_what_was_computed_before_an_error_is_kept(
    local_db: Connection,
    calls: Calls,
    tmp_path: Path,
    kind: pa.DataType,
    value: Callable[[int], Any],
    where: str | None,
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    table = make_table(local_db, [ROWS])
    table.add_columns({"x": counted(calls, fails_at(broken, 72, value), data_type=kind)})
    wanted = [i for i in range(ROWS) if where is None or i % 3 != 1]
    with pytest.raises(UDFExecutionError, match="row 72"):
        table.backfill("x", where=where, task_size=ROWS)
    first = [i for i in calls.taken() if i != 72]
    assert [i for i in wanted if i < 72][: len(first)] == first
    assert len(first) > ROWS // 3
    broken.unlink()
    table.backfill("x", where=where, task_size=ROWS)
    computed = calls.rows
    assert sorted([*first[: len(wanted) - len(computed)], *computed]) == wanted
    lost = len(first) - (len(wanted) - len(computed))
    assert lost < SIZE, "no more than the batch with the row that failed"
    expected = pa.array(
        [value(i) if i in wanted else None for i in range(ROWS)], without_json(kind)
    )
    assert column(table, "x") == expected.to_pylist()
    files = {Path(p).name for p in (Path(table.ref.uri) / "data").iterdir()}
    assert len(files) <= 3, "the file that was read back is gone"


@pytest.mark.parametrize("name", ["int64", "vector", "json", "struct of json"])
def test_what_a_task_gives_back_is_put_together(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two slots share a fragment: its file is read back, and no error is needed for that."""
    monkeypatch.setattr(sizing, "_FIRST_SECONDS", 0.05)
    kind, value = next(t[1:] for t in TYPES if t[0] == name)
    given: list[RowRange] = []
    give_back = writer.PartWriter.give_back

    def noted(self: writer.PartWriter) -> Any:
        result = give_back(self)
        given.append(result.rows)
        return result

    monkeypatch.setattr(writer.PartWriter, "give_back", noted)
    db = connect(tmp_path / "db", lambda: InProcessRunner(2))

    def slow(id: int) -> Any:
        time.sleep(0.002)
        return value(id)

    table = make_table(db, [4 * ROWS])
    table.add_columns({"x": counted(calls, slow, data_type=kind)})
    table.backfill("x")
    expected = pa.array([value(i) for i in range(4 * ROWS)], without_json(kind))
    assert column(table, "x") == expected.to_pylist()
    assert sorted(calls.rows) == list(range(4 * ROWS))
    assert given


@pytest.mark.parametrize("at", [3, 40])
def test_json_of_rows_among_which_some_are_skipped(
    local_db: Connection, calls: Calls, at: int
) -> None:
    """Lance gives JSON in a form of its own when a file is read: such files are not copied."""

    def failing(id: int) -> str:
        if id == at:
            raise ValueError("no")
        return f'{{"a":{id}}}'

    table = make_table(local_db, [ROWS])
    function = counted(calls, failing, data_type=pa.json_(), on_error=skip_on_error())
    table.add_columns({"x": function})
    table.backfill("x")
    assert by_id(table, "x") == {i: None if i == at else f'{{"a":{i}}}' for i in range(ROWS)}
    calls.clear()
    table.backfill("x")
    assert calls.count == 0


def test_rows_far_apart_are_read_back_piece_by_piece(
    local_db: Connection, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_file, "_READ_BYTES", 100)
    monkeypatch.setattr(writer, "MAX_UNSAVED_BYTES", 1_000)
    reads: list[int] = []
    read_range = column_file.read_range

    def noted(ref: TableRef, path: str, rows: RowRange) -> pa.RecordBatch:
        reads.append(len(rows))
        return read_range(ref, path, rows)

    monkeypatch.setattr(column_file, "read_range", noted)
    broken = tmp_path / "broken"
    broken.touch()
    table = make_table(local_db, [10 * ROWS])
    function = fails_at(broken, 980, lambda id: id * 3)
    table.add_columns({"x": counted(calls, function, data_type="int64")})
    with pytest.raises(UDFExecutionError, match="row 980"):
        table.backfill("x", where="id % 10 = 0", task_size=10 * ROWS)
    assert reads
    assert max(reads) <= 100 // 8
    broken.unlink()
    calls.clear()
    table.backfill("x", where="id % 10 = 0", task_size=10 * ROWS)
    assert len(calls.rows) < 10
    assert by_id(table, "x") == {i: None if i % 10 else 3 * i for i in range(10 * ROWS)}


def test_of_many_rows_checkpoints_are_made(
    local_db: Connection, calls: Calls, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held of each row, to read it back, would come to much memory, however small it is."""
    monkeypatch.setattr(pacing, "_FILE_ROWS", ROWS)
    table = make_table(local_db, [ROWS, ROWS + 1])
    table.add_columns({"x": counted(calls, lambda id: id * 3, data_type="int64")})
    table.backfill("x", task_size=2 * ROWS + 1)
    assert column(table, "x") == [3 * i for i in range(2 * ROWS + 1)]
    assert len(saved) > ROWS // 2
    assert max(saved) <= ROWS, "of the rows of the second fragment"


def test_where_it_takes_longer_than_expected_checkpoints_are_made(
    local_db: Connection, calls: Calls, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick rows first, slow ones behind: what is lost with a worker stays bounded."""
    monkeypatch.setattr(pacing, "_FILE_SECONDS", 0.5)

    def slowing(id: int) -> int:
        if id > 50:
            time.sleep(0.03)
        return id * 3

    table = make_table(local_db, [ROWS])
    table.add_columns({"x": counted(calls, slowing, data_type="int64")})
    table.backfill("x", task_size=ROWS)
    assert column(table, "x") == [3 * i for i in range(ROWS)]
    assert 10 < len(saved) < 60, "of the slow rows"


@pytest.mark.parametrize("at", [2, 50, 98])
def test_what_happened_to_rows_is_known(local_db: Connection, calls: Calls, at: int) -> None:
    def failing(id: int) -> int:
        if id == at:
            raise ValueError("no")
        return id * 3

    table = make_table(local_db, [ROWS])
    function = counted(calls, failing, data_type="int64", on_error=skip_on_error())
    table.add_columns({"x": function})
    table.backfill("x", task_size=ROWS)
    assert by_id(table, "x") == {i: None if i == at else 3 * i for i in range(ROWS)}
    assert [error.message for error in table.get_errors()] == ["no"]
    calls.clear()
    table.backfill("x")
    assert calls.count == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"checkpoint_size": 20},
        {"max_checkpoint_size": 20},
        {"batch_checkpoint_flush_interval_seconds": 0.0},
    ],
)
def test_what_was_asked_for_is_kept(
    local_db: Connection, calls: Calls, saved: list[int], sizes: dict[str, Any]
) -> None:
    table = make_table(local_db, [ROWS])
    table.add_columns({"x": counted(calls, lambda id: id * 3, data_type="int64")})
    table.backfill("x", task_size=ROWS, **sizes)
    assert sorted(saved) == list(range(ROWS))


def test_a_file_that_can_not_be_read_back_costs_its_rows(
    local_db: Connection, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_store(*_: Any) -> None:
        raise OSError("gone")

    broken = tmp_path / "broken"
    broken.touch()
    table = make_table(local_db, [ROWS])
    function = counted(calls, fails_at(broken, 72, lambda id: id * 3), data_type="int64")
    table.add_columns({"x": function})
    with monkeypatch.context() as patch:
        patch.setattr("geneva.execution.worker.column_file.read_range", broken_store)
        with pytest.raises(UDFExecutionError, match="row 72"):
            table.backfill("x", task_size=ROWS)
    broken.unlink()
    table.backfill("x")
    assert column(table, "x") == [3 * i for i in range(ROWS)]


def test_maps_hold_no_json() -> None:
    """Such a column would be neither taken back nor copied."""
    inner = pa.map_(pa.string(), pa.int64(), keys_sorted=True)
    assert without_json(pa.struct({"m": inner})) == pa.struct({"m": inner})
    assert not holds_json(inner)
    assert holds_json(pa.map_(pa.string(), pa.json_()))
