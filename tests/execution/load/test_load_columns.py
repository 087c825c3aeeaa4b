"""Columns that are loaded from elsewhere by key: what is joined, refused, kept and done again."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from geneva import Connection, JobStatus, Table, udf, udtf
from geneva.errors import (
    ColumnChangedError,
    ColumnNotFoundError,
    DuplicateKeyError,
    GenevaError,
    JobCancelledError,
    JobTimeoutError,
    NullKeyError,
    TypeMismatchError,
    UnknownOptionError,
    UnmatchedKeyError,
    UnreadableSourceError,
    UserInputError,
)
from geneva.execution.backfill.committer import publish_columns
from geneva.execution.load import work
from geneva.storage.loads import lookup, staging
from support import Calls, by_id, column, counted, make_table, publishing

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "v": ["a", "b", "c"]})


def files_of(table: Table) -> dict[int, set[str]]:
    fragments = lance.dataset(table.ref.uri).get_fragments()
    return {f.fragment_id: {file.path for file in f.data_files()} for f in fragments}


def staged(table: Table) -> list[Path]:
    """What loads have left in the table's folder."""
    return sorted(Path(table.ref.uri, "_checkpoints").rglob("loads/**/*"))


def write(path: Path, rows: pa.Table = ROWS) -> str:
    pq.write_table(rows, path)
    return str(path)


# ---------------------------------------------------------------------------------------- sources


def parquet_file(folder: Path) -> Any:
    return write(folder / "rows.parquet")


def a_path(folder: Path) -> Any:
    return Path(write(folder / "rows.parquet"))


def folder_as_spark_writes_it(folder: Path) -> Any:
    made = folder / "rows"
    (made / "day=1").mkdir(parents=True)
    write(made / "day=1" / "part-0.parquet", ROWS.slice(0, 1))
    write(made / "part-1.parquet", ROWS.slice(1))
    (made / "_SUCCESS").touch()
    (made / "part-1.parquet.crc").write_text("no parquet")
    return str(made)


def list_of_files(folder: Path) -> Any:
    return [write(folder / f"{i}.pq", ROWS.slice(i, 1)) for i in range(3)]


def lance_table(folder: Path) -> Any:
    rows = pa.concat_tables([ROWS, pa.table({"id": [9], "v": ["deleted"]})])
    dataset = lance.write_dataset(rows, folder / "rows.lance", max_rows_per_file=2)
    dataset.delete("id = 9")
    return dataset.uri


def lance_folder_without_suffix(folder: Path) -> Any:
    return lance.write_dataset(ROWS, folder / "rows").uri


def arrow_file(folder: Path) -> Any:
    with pa.ipc.new_file(folder / "rows.arrow", ROWS.schema) as writer:
        writer.write_table(ROWS, max_chunksize=2)
    return str(folder / "rows.arrow")


def arrow_stream(folder: Path) -> Any:
    with pa.ipc.new_stream(folder / "rows.arrows", ROWS.schema) as writer:
        writer.write_table(ROWS)
    return str(folder / "rows.arrows")


def feather_without_suffix(folder: Path) -> Any:
    (folder / "rows").mkdir()
    with pa.ipc.new_file(folder / "rows" / "0.feather", ROWS.schema) as writer:
        writer.write_table(ROWS)
    return str(folder / "rows")


def arrow_table(folder: Path) -> Any:
    return ROWS


def arrow_batches(folder: Path) -> Any:
    return ROWS.to_reader(max_chunksize=1)


def pandas_frame(folder: Path) -> Any:
    return ROWS.to_pandas()


@pytest.mark.parametrize(
    "source",
    [
        parquet_file,
        a_path,
        folder_as_spark_writes_it,
        list_of_files,
        lance_table,
        lance_folder_without_suffix,
        arrow_file,
        arrow_stream,
        feather_without_suffix,
        arrow_table,
        arrow_batches,
        pandas_frame,
    ],
)
def test_sources(local_db: Connection, tmp_path: Path, source: Callable[[Path], Any]) -> None:
    table = make_table(local_db, [[3, 1], [7]])
    result = table.load_columns(source(tmp_path), "id", ["v"])
    assert by_id(table, "v") == {3: "c", 1: "a", 7: None}
    assert (result.status, result.rows_committed) == (JobStatus.DONE, 3)
    assert str(result).startswith("DONE: 2 rows loaded, 1 not in the source in ")
    assert staged(table) == []


def test_rows_without_a_match_are_counted_where_nothing_changes(local_db: Connection) -> None:
    """Also in fragments that keep their files, because they have been looked up as well."""
    table = make_table(local_db, [[3, 1], [7], [9]])
    table.load_columns(ROWS, "id", ["v"])
    again = table.load_columns(ROWS, "id", ["v"])
    assert str(again).startswith("DONE: nothing to do, 2 not in the source (")
    more = pa.table({"id": [1, 3, 9], "v": ["other", "c", "z"]})
    result = table.load_columns(more, "id", ["v"])
    assert str(result).startswith("DONE: 3 rows loaded, 1 not in the source in ")
    assert result.progress.unmatched_rows == 1


def test_a_format_is_given(local_db: Connection, tmp_path: Path) -> None:
    table = make_table(local_db, [[1]])
    path = write(tmp_path / "rows.data")
    table.load_columns(path, "id", "v", source_format="parquet")
    assert column(table, "v") == ["a"]
    with pytest.raises(UserInputError, match="can't be read as ipc"):
        table.load_columns(path, "id", "v", source_format="ipc")
    with pytest.raises(UserInputError, match=r"one of 'parquet', 'lance', 'ipc', not 'csv'\. What"):
        table.load_columns(path, "id", "v", source_format="csv")
    with pytest.raises(UserInputError, match=r"not 'parket'\. Did you mean 'parquet'"):
        table.load_columns(path, "id", "v", source_format="parket")
    with pytest.raises(UserInputError, match="the source is a Table: leave it out"):
        table.load_columns(ROWS, "id", "v", source_format="parquet")


# ---------------------------------------------------------------------------- rows without a match


@pytest.mark.parametrize(("on_missing", "kept"), [("carry", "old"), ("null", None)])
def test_rows_without_a_match(local_db: Connection, on_missing: str, kept: str | None) -> None:
    old = pa.table({"id": [1, 5, None], "v": ["old"] * 3, "w": [0, 0, 0]})
    table = make_table(local_db, [old])
    rows = ROWS.append_column("w", pa.array([10, 20, 30])).append_column("n", pa.array([1, 2, 3]))
    table.load_columns(rows, "id", ["v", "n"], on_missing=on_missing)
    assert by_id(table, "v") == {1: "a", 5: kept, None: kept}
    assert by_id(table, "n") == {1: 1, 5: None, None: None}
    assert column(table, "w") == [0, 0, 0], "it was not asked for"


def test_a_missing_key_is_an_error_if_asked_for(local_db: Connection, tmp_path: Path) -> None:
    table = make_table(local_db, [[1, 2], [3, 4, 5]])
    path, before = write(tmp_path / "rows.parquet"), table.version
    message = r"2 rows of table 't' have a 'id' that is not in .*rows.parquet, such as 4"
    with pytest.raises(UnmatchedKeyError, match=message):
        table.load_columns(path, "id", ["v"], on_missing="error")
    assert (lance.dataset(table.ref.uri).version, staged(table)) == (before, [])
    table.delete("id > 3")
    table.load_columns(path, "id", ["v"], on_missing="error")
    assert column(table, "v") == ["a", "b", "c"]


def test_rows_that_come_meanwhile_are_an_error_too(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])

    def append_first(*job: Any) -> Any:
        if len(table) == 2:
            local_db.open_table("t").add(pa.table({"id": [8]}))
            table.checkout_latest()
        return publish_columns(*job)

    with publishing(local_db, append_first), pytest.raises(UnmatchedKeyError, match="The key 8"):
        table.load_columns(ROWS, "id", ["v"], on_missing="error")
    assert by_id(table, "v") == {1: "a", 2: "b", 8: None}


# -------------------------------------------------------------------------------- what is refused


@udf
def length(v: str) -> int:
    return len(v or "")


REFUSED: dict[str, tuple[dict[str, Any], type[GenevaError], str]] = {
    "no such key": ({"pk": "key"}, ColumnNotFoundError, "no column 'key' in the rows given"),
    "no key in the table": (
        {"source": ROWS.rename_columns(["ident", "v"]), "pk": "ident"},
        ColumnNotFoundError,
        "'ident'",
    ),
    "no such column": ({"columns": ["w"]}, ColumnNotFoundError, "It has id, v"),
    "no columns": ({"columns": []}, UserInputError, "names of columns"),
    "twice": ({"columns": ["v", "v"]}, UserInputError, "named twice"),
    "the key": ({"columns": ["id"]}, UserInputError, "'id' is the key"),
    "several keys": ({"pk": ["id"]}, UserInputError, "the name of one column"),
    "a rule": ({"on_missing": "keep"}, UserInputError, "'carry', 'null', 'error', not 'keep'"),
    "an option": ({"concurency": 2}, UnknownOptionError, "Did you mean 'concurrency'"),
    "an empty list": ({"source": []}, UserInputError, "empty list"),
    "nothing there": ({"source": "/nowhere/rows.parquet"}, UserInputError, "nothing to load at"),
    "no table there": ({"source": "/nowhere/rows.lance"}, UserInputError, "no Lance table at"),
    "another store": ({"source": "ftp://host/rows.parquet"}, UserInputError, "ftp://"),
    "keys of another type": (
        {"source": pa.table({"id": ["1"], "v": ["a"]})},
        TypeMismatchError,
        "string can't be int64",
    ),
    "floats as keys": (
        {"source": pa.table({"id": [1.0], "v": ["a"]})},
        TypeMismatchError,
        "can't be a key: it is double",
    ),
    "keys out of range": (
        {"source": pa.table({"id": pa.array([2**63], pa.uint64()), "v": ["a"]})},
        TypeMismatchError,
        "not every uint64 can be int64",
    ),
    "JSON": (
        {"source": pa.table({"id": [1], "j": pa.array(["{}"], pa.json_())}), "columns": ["j"]},
        TypeMismatchError,
        "JSON, which load_columns can't load",
    ),
    "runs": (
        {"source": pa.table({"id": [1], "r": pc.run_end_encode(pa.array([7]))}), "columns": ["r"]},
        TypeMismatchError,
        "Column 'r' of the rows given is run_end_encoded.*run_end_decode",
    ),
    "values of another type": (
        {"source": pa.table({"id": [1], "n": ["a"]}), "columns": ["n"]},
        TypeMismatchError,
        "string can't be int32",
    ),
    "values out of range": (
        {"source": pa.table({"id": [1, 2], "n": [1, 2**40]}), "columns": ["n"]},
        TypeMismatchError,
        "not every int64 can be int32",
    ),
    "no type": (
        {"source": pa.table({"id": [1], "new": pa.nulls(1)}), "columns": ["new"]},
        TypeMismatchError,
        "nobody knows the type",
    ),
    "NULL keys": (
        {"source": pa.table({"id": [1, None], "v": ["a", "b"]})},
        NullKeyError,
        "Row 1 of the rows given has no key",
    ),
    "duplicate keys": (
        {"source": pa.table({"id": [1, 2, 3, 2], "v": list("abcd")})},
        DuplicateKeyError,
        "have the same 'id': 2. Which",
    ),
    "a computed column": (
        {"source": pa.table({"id": [1], "n2": [1]}), "columns": ["n2"]},
        UserInputError,
        r"computed, by length\(v\).*drop_columns",
    ),
    "NULL where it can't be": (
        {
            "source": pa.table({"id": [1], "must": [1]}),
            "columns": ["must"],
            "on_missing": "null",
        },
        UserInputError,
        "can't be NULL",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_writes_nothing(local_db: Connection, case: str) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("v", pa.string()),
            pa.field("n", pa.int32()),
            pa.field("must", pa.int64(), nullable=False),
        ]
    )
    table = make_table(local_db, [pa.table([[1], ["x"], [1], [1]], schema=schema)])
    table.add_columns({"n2": length})
    given, error, message = REFUSED[case]
    asked = {"source": ROWS, "pk": "id", "columns": ["v"], **given}
    before = lance.dataset(table.ref.uri).version
    with pytest.raises(error, match=message):
        table.load_columns(**asked)
    assert lance.dataset(table.ref.uri).version == before
    assert staged(table) == []


def test_a_checked_out_version_is_not_loaded_into(local_db: Connection) -> None:
    table = make_table(local_db, [[1], [2]])
    table.checkout(1)
    with pytest.raises(UserInputError, match="load_columns is not possible"):
        table.load_columns(ROWS, "id", ["v"])


def test_columns_of_a_view_come_from_its_query(local_db: Connection) -> None:
    table = local_db.create_table("t", pa.table({"id": [1, 2], "v": ["x", "y"]}))
    view = local_db.create_materialized_view("view", table.query().select(["id", "v"]))
    view.refresh()
    with pytest.raises(UserInputError, match="comes from its query"):
        view.load_columns(ROWS, "id", ["v"])
    view.load_columns(ROWS.rename_columns(["id", "extra"]), "id", ["extra"])
    assert by_id(view, "extra") == {1: "a", 2: "b"}
    table.add(pa.table({"id": [3], "v": ["z"]}))
    view.refresh()
    assert by_id(view, "extra") == {1: "a", 2: "b", 3: None}
    view.load_columns(ROWS.rename_columns(["id", "extra"]), "id", ["extra"])
    assert by_id(view, "extra") == {1: "a", 2: "b", 3: "c"}


# --------------------------------------------------------------------------------- what is written


def test_only_files_of_the_loaded_columns_are_new(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2], [3]])
    before = files_of(table)
    table.load_columns(ROWS, "id", ["v"])
    after = files_of(table)
    assert all(before[fragment] < after[fragment] for fragment in before)
    assert [len(after[fragment] - before[fragment]) for fragment in before] == [1, 1]


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_types_in_every_format(local_db: Connection, version: str) -> None:
    """Types come as they are in the source, and are converted to what the table has."""
    table = make_table(local_db, [3], storage_version=version)
    rows = pa.table(
        {
            "id": pa.array([2, 0], pa.int16()),
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "tags": pa.array([["a", None], []], pa.list_(pa.string())),
            "pair": pa.array([{"x": 1, "y": "s"}, {"x": 2, "y": None}]),
            "kind": pa.array(["red", "blue"]).dictionary_encode(),
            "when": pa.array([0, 1], pa.timestamp("ns", "UTC")),
            "data": pa.array([b"\0", b""], pa.large_binary()),
        }
    )
    names = rows.column_names[1:]
    if version == "2.0":
        with pytest.raises(TypeMismatchError, match=r"'pair'.*storage version 2.0, can't hold"):
            table.load_columns(rows, "id", names)
        names.remove("pair")
    table.load_columns(rows, "id", names)
    found = lance.dataset(table.ref.uri).to_table()
    expected = {row["id"]: row for row in rows.to_pylist()}
    for row in found.to_pylist():
        known = expected.get(row["id"], {})
        assert all(row[name] == known.get(name) for name in names)
    assert found.schema.field("vector").type == rows.schema.field("vector").type
    assert found.schema.field("kind").type == pa.string()


def test_a_dictionary_column_is_filled(local_db: Connection) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    old = pa.table({"id": [1, 2, 9], "v": pa.array(["x", "y", "z"]).cast(kind)})
    table = make_table(local_db, [old])
    table.load_columns(ROWS, "id", ["v"])
    assert by_id(table, "v") == {1: "a", 2: "b", 9: "z"}


# ----------------------------------------------------------------------------------- a second time


def test_a_second_load_costs_what_changed(local_db: Connection, tmp_path: Path) -> None:
    table = make_table(local_db, [[1, 2], [3]])
    path = write(tmp_path / "rows.parquet")
    table.load_columns(path, "id", ["v"])
    loaded = files_of(table)
    again = table.load_columns(path, "id", ["v"])
    assert str(again).startswith("DONE: nothing to do")
    assert files_of(table) == loaded

    table.add(pa.table({"id": [2, 4]}))
    assert table.load_columns(path, "id", ["v"]).rows_committed == 2, "just the rows that came"
    assert {f: files_of(table)[f] for f in loaded} == loaded

    table.update(where="id = 3", values={"v": "mine"})
    assert table.load_columns(path, "id", ["v"]).rows_committed == 1, "what somebody wrote since"
    assert column(table, "v") == ["a", "b", "b", None, "c"]

    table.compact_files()
    assert str(table.load_columns(path, "id", ["v"])).startswith("DONE: nothing to do")

    write(tmp_path / "rows.parquet", pa.table({"id": [4], "v": ["new"]}))
    assert table.load_columns(path, "id", ["v"]).rows_committed == 5, "the source is another one"
    assert column(table, "v") == ["a", "b", "b", "new", "c"]
    assert table.load_columns(path, "id", ["v"], on_missing="null").rows_committed == 5
    assert column(table, "v") == [None, None, None, "new", None]


def test_fragments_without_a_new_value_keep_their_files(
    local_db: Connection, tmp_path: Path, calls: Calls
) -> None:
    """A source that has grown is another one: its old rows are compared, and not written again."""
    table = make_table(local_db, [[1], [2], [3], [4]])
    path = write(tmp_path / "rows.parquet", ROWS.slice(0, 2))
    table.load_columns(path, "id", ["v"])
    table.add_columns({"n": counted(calls, length, input_columns=["v"])})
    table.backfill("n")
    calls.clear()
    before = files_of(table)
    write(tmp_path / "rows.parquet")  # one more key, which the third fragment has
    result = table.load_columns(path, "id", ["v"])
    assert (result.progress.loaded_rows, result.rows_committed) == (1, 1)
    changed = {f for f in before if files_of(table)[f] != before[f]}
    assert changed == {2}
    assert column(table, "v") == ["a", "b", "c", None]
    table.backfill("n")
    assert calls.taken() == ["c"]
    assert str(table.load_columns(path, "id", ["v"])).startswith("DONE: nothing to do")

    table.update(where="id = 2", values={"v": "mine"})
    assert table.load_columns(path, "id", ["v"]).rows_committed == 1
    assert by_id(table, "v") == {1: "a", 2: "b", 3: "c", 4: None}
    again = table.load_columns(path, "id", ["v"], on_missing="null")
    assert str(again).startswith("DONE: nothing to do"), "they are NULL already"


def test_a_dropped_column_is_loaded_again(local_db: Connection, tmp_path: Path) -> None:
    table = make_table(local_db, [[1, 2]])
    path = write(tmp_path / "rows.parquet")
    table.load_columns(path, "id", ["v"])
    table.drop_columns(["v"])
    table.load_columns(path, "id", ["v"])
    assert column(table, "v") == ["a", "b"]


def test_what_is_computed_from_a_loaded_column_is_stale(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [[1, 2], [3, 4]])
    table.load_columns(ROWS, "id", ["v"])
    table.add_columns(
        {"n": counted(calls, lambda v: len(v or ""), data_type=pa.int64(), input_columns=["v"])}
    )
    table.backfill("n")
    assert calls.taken() == ["a", "b", "c", None]
    table.load_columns(pa.table({"id": [2, 3, 4], "v": ["b", "longer", "d"]}), "id", ["v"])
    table.backfill("n")
    assert calls.taken() == ["d", "longer"], "the rows whose value is another one"
    assert column(table, "n") == [1, 1, 6, 1]


def test_a_load_after_a_crash_goes_on(local_db: Connection, tmp_path: Path) -> None:
    """Neither source nor rows are read again: both are staged, and nothing was committed."""
    table = make_table(local_db, [[1, 2], [3]])
    path = write(tmp_path / "rows.parquet")

    def fail(*_: Any) -> Any:
        raise OSError("the driver is gone")

    with publishing(local_db, fail), pytest.raises(OSError, match="gone"):
        table.load_columns(path, "id", ["v"], checkpoint_interval_seconds=0)
    left = staged(table)
    assert any(file.suffix == ".arrow" for file in left)
    times = {file: file.stat().st_mtime_ns for file in left}
    changed = {}

    def look(*job: Any) -> Any:
        changed.update({f: f.stat().st_mtime_ns for f in left if f.stat().st_mtime_ns != times[f]})
        return publish_columns(*job)

    with publishing(local_db, look):
        result = table.load_columns(path, "id", ["v"], checkpoint_interval_seconds=0)
    assert changed == {}
    assert (result.rows_reused, result.rows_committed) == (3, 3)
    assert (column(table, "v"), staged(table)) == (["a", "b", "c"], [])


def test_what_a_crash_left_is_removed(local_db: Connection, tmp_path: Path) -> None:
    table = make_table(local_db, [[1, 2]])

    def fail(*_: Any) -> Any:
        raise OSError("the driver is gone")

    for remove in (
        table.cleanup_checkpoints,
        lambda: table.load_columns(ROWS, "id", ["v"]),
    ):
        with publishing(local_db, fail), pytest.raises(OSError, match="gone"):
            table.load_columns(write(tmp_path / "rows.parquet"), "id", ["v"])
        assert staged(table)
        remove()
        assert staged(table) == []


# ------------------------------------------------------------------------------- others meanwhile


def change_nothing(table: Table) -> None:
    pass


def append(table: Table) -> None:
    table.add(pa.table({"id": [3, 2]}))


def delete(table: Table) -> None:
    table.delete("id = 1")


def update(table: Table) -> None:
    table.update(where="id = 2", values={"x": 7})


def change_a_key(table: Table) -> None:
    table.update(where="id = 2", values={"id": 3})


def compact(table: Table) -> None:
    table.compact_files()


def write_the_column(table: Table) -> None:
    table.update(where="id < 3", values={"v": "theirs"})


@pytest.mark.parametrize(
    "change",
    [change_nothing, append, delete, update, change_a_key, compact, write_the_column],
)
def test_others_change_the_table_meanwhile(
    local_db: Connection, change: Callable[[Table], None]
) -> None:
    fragments = [
        pa.table({"id": ids, "x": [0] * len(ids), "v": ["old"] * len(ids)})
        for ids in ([1, 2], [5], [3])
    ]
    table = make_table(local_db, fragments, stable_row_ids=True)
    changed = []

    def change_first(*job: Any) -> Any:
        if not changed:
            changed.append(change(local_db.open_table("t")))
        return publish_columns(*job)

    with publishing(local_db, change_first):
        table.load_columns(ROWS, "id", ["v"])
    known = dict(zip(*ROWS.to_pydict().values(), strict=True))
    found = lance.dataset(table.ref.uri).to_table().to_pylist()
    assert len(found) == {append: 6, delete: 3}.get(change, 4)
    assert all(row["v"] == known.get(row["id"], "old") for row in found)


def test_a_column_that_is_dropped_meanwhile(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])

    def drop(*job: Any) -> Any:
        lance.dataset(table.ref.uri).drop_columns(["v"])
        return publish_columns(*job)

    with publishing(local_db, drop), pytest.raises(ColumnChangedError, match=r"'v'.*was dropped"):
        table.load_columns(ROWS, "id", ["v"])


PAIR = pa.struct([("a", pa.int64()), ("b", pa.int64())])
HALF = pa.struct([("a", pa.int64())])


@pytest.mark.parametrize(
    ("given", "kind", "lacking"),
    [
        (HALF, PAIR, "b"),
        (pa.struct([("n", HALF)]), pa.struct([("n", PAIR)]), "n.b"),
        (pa.list_(HALF), pa.list_(PAIR), "b"),
        (pa.map_(pa.string(), HALF), pa.map_(pa.string(), PAIR), "b"),
    ],
    ids=str,
)
def test_fields_that_the_source_lacks_are_not_made_null(
    local_db: Connection, given: pa.DataType, kind: pa.DataType, lacking: str
) -> None:
    data = pa.table({"id": [1], "s": pa.nulls(1, kind)})
    table = local_db.create_table("s", data)
    before = table.version
    with pytest.raises(TypeMismatchError, match=f"no field '{lacking}'"):
        table.load_columns(pa.table({"id": [1], "s": pa.nulls(1, given)}), "id", ["s"])
    assert table.version == before
    table.load_columns(data, "id", ["s"])


# ------------------------------------------------------------------------------------------- jobs


def test_a_load_is_a_job(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])
    result = table.load_columns(ROWS, "id", ["v"], job_id="mine", commit_granularity=1)
    job = local_db.get_job("mine")
    assert (job.job_type, job.column_name, job.status) == ("LOAD", "v", JobStatus.DONE)
    assert job.config["source"] == "the rows given"
    assert (job.config["pk"], job.config["on_missing"]) == ("id", "carry")
    assert (job.metrics["loaded_rows"], job.metrics["unmatched_rows"]) == (2, 0)
    assert result == "mine"
    assert len(table.to_arrow()) == 2, "the handle reads what was loaded"


def test_a_load_in_the_background_can_be_cancelled(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])
    begun, go_on = Event(), Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield ROWS.to_batches()[0]
        begun.set()
        go_on.wait(60)
        yield from ROWS.slice(0, 0).to_batches() or [ROWS.to_batches()[0]]

    source = pa.RecordBatchReader.from_batches(ROWS.schema, batches())
    future = table.load_columns_async(source, "id", ["v"])
    assert begun.wait(60)
    future.cancel()
    go_on.set()
    with pytest.raises(JobCancelledError, match=r"No value was loaded, .* begins anew"):
        future.result()
    assert "v" not in lance.dataset(table.ref.uri).schema.names
    assert staged(table) == []


def test_a_timeout_keeps_nothing_of_rows_in_memory_and_says_so(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])
    for rows in (ROWS, ROWS.to_pandas()):
        with pytest.raises(JobTimeoutError, match=r"No value was loaded, .* begins anew"):
            table.load_columns(rows, "id", ["v"], timeout=1e-9)
    assert staged(table) == []
    assert table.load_columns(ROWS, "id", ["v"]).rows_committed == 2


def test_in_the_background(local_db: Connection) -> None:
    table = make_table(local_db, [[1, 2]])
    with pytest.raises(ColumnNotFoundError):
        table.load_columns_async(ROWS, "id", ["nope"])
    assert table.load_columns_async(ROWS, "id", ["v"]).result().rows_committed == 2
    assert column(table, "v") == ["a", "b"]


# ------------------------------------------------------------------------- many keys, of all kinds

KEYS: dict[str, Callable[[np.random.Generator, int], pa.Array]] = {
    "int": lambda rng, n: pa.array(rng.integers(-40, 40, n)),
    "string": lambda rng, n: pa.array([f"key {i}" for i in rng.integers(0, 60, n)]),
    "binary": lambda rng, n: pa.array([bytes([i % 7, i]) for i in rng.integers(0, 60, n)]),
    "fixed": lambda rng, n: pa.array([bytes([i, 0]) for i in rng.integers(0, 60, n)], pa.binary(2)),
    "date": lambda rng, n: pa.array(rng.integers(0, 60, n).astype("int32")).cast(pa.date32()),
    "timestamp": lambda rng, n: pa.array(rng.integers(0, 60, n), pa.timestamp("us", "UTC")),
    "decimal": lambda rng, n: pa.array(rng.integers(0, 60, n)).cast(pa.decimal128(20, 1)),
}


QUICK_KEYS = (("int", 0), ("string", 1), ("decimal", 0), ("binary", 1))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(*case, marks=[] if case in QUICK_KEYS else [pytest.mark.slow])
        for case in itertools.product(KEYS, range(2))
    ],
)
def test_a_load_is_a_join(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, seed: int
) -> None:
    """Against a dict: any keys, in any order, over small blocks, from memory and from disk."""
    rng = np.random.default_rng([seed, *os.fsencode(kind)])
    monkeypatch.setattr(staging, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(staging, "_INDEX_ROWS", 5)
    monkeypatch.setattr(lookup, "_KEPT_BYTES", int(rng.integers(0, 2)) * 2**20)
    if seed:  # different keys with the same hash
        plain = staging.digest_rows
        few = np.uint64(0b1000_0000_0000_0011) << np.uint64(48)
        monkeypatch.setattr(staging, "digest_rows", lambda *rows: plain(*rows) & few)
    table = _random_table(local_db, kind, rng)
    model = {row["row"]: {"new": None, **row} for row in table.to_arrow().to_pylist()}
    sources = [_random_source(kind, rng) for _ in range(2)]
    paths = [write(tmp_path / f"{i}.parquet", source) for i, source in enumerate(sources)]
    for _ in range(4):
        chosen = int(rng.integers(0, 2))
        on_missing = str(rng.choice(["carry", "null"], p=[0.8, 0.2]))
        again = sources[chosen].to_reader(max_chunksize=3) if rng.random() < 0.3 else paths[chosen]
        table.load_columns(again, "key", ["v", "new"], on_missing=on_missing)
        known = {row["key"]: row for row in sources[chosen].to_pylist()}
        for row in model.values():
            found = known.get(row["key"]) if row["key"] is not None else None
            if found is not None or on_missing == "null":
                row |= {"v": None, "new": None} if found is None else found
        assert {row["row"]: row for row in table.to_arrow().to_pylist()} == model
        _change(table, model, rng)


def _random_source(kind: str, rng: np.random.Generator) -> pa.Table:
    keys = KEYS[kind](rng, 80).unique()
    values = [None if rng.random() < 0.1 else f"{rng.integers(99)}" for _ in keys]
    return pa.table({"key": keys, "v": values, "new": pa.array(rng.integers(0, 99, len(keys)))})


def _change(table: Table, model: dict[int, dict[str, Any]], rng: np.random.Generator) -> None:
    """Let others change the table, and the model with it."""
    match int(rng.integers(0, 5)):
        case 0:
            gone = int(rng.choice([*model]))
            table.delete(f"`row` = {gone}")
            del model[gone]
        case 1:
            theirs = int(rng.choice([*model]))
            table.update(where=f"`row` = {theirs}", values={"v": "theirs"})
            model[theirs]["v"] = "theirs"
        case 2:
            table.compact_files()
        case 3:
            row = {**next(iter(model.values())), "row": 1_000 + len(model), "v": "appended"}
            schema = table.schema
            table.add(pa.Table.from_pylist([row], schema=schema))
            model[row["row"]] = row


def _random_table(db: Connection, kind: str, rng: np.random.Generator) -> Table:
    fragments, start = [], 0
    for rows in rng.integers(1, 40, 3).tolist():
        keys = KEYS[kind](rng, rows)
        keys = pa.array(
            [None if rng.random() < 0.1 else key for key in keys.to_pylist()], keys.type
        )
        numbers = pa.array(range(start, start + rows), pa.int64())
        fragments.append(pa.table({"row": numbers, "key": keys, "v": pa.array(["old"] * rows)}))
        start += rows
    return make_table(db, fragments)


def test_many_equal_hashes(local_db: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that have nothing but their hash in common are no duplicates, and are told apart."""
    monkeypatch.setattr(
        staging, "digest_rows", lambda columns, seed, rows: np.zeros(rows, dtype=np.uint64)
    )
    table = make_table(local_db, [[3, 1, 9]])
    table.load_columns(ROWS, "id", ["v"])
    assert by_id(table, "v") == {3: "c", 1: "a", 9: None}
    twice = pa.table({"id": [5, 6, 7, 5], "v": list("abcd")})
    with pytest.raises(DuplicateKeyError, match="'id': 5"):
        table.load_columns(twice, "id", ["v"])


# ------------------------------------------------------------------ found by strangers' attacks


def test_a_source_whose_columns_change_names_is_another_one(
    local_db: Connection, tmp_path: Path
) -> None:
    uri = str(tmp_path / "source.lance")
    rows = {"id": [0, 1], "v": [1.0, 2.0], "w": [10.0, 20.0]}
    lance.write_dataset(pa.table(rows), uri)
    table = make_table(local_db, [2])
    table.load_columns(uri, "id", ["v"])
    lance.dataset(uri).alter_columns({"path": "v", "name": "old"})
    lance.dataset(uri).alter_columns({"path": "w", "name": "v"})
    table.load_columns(uri, "id", ["v"])
    assert by_id(table, "v") == {0: 10.0, 1: 20.0}


def test_suffixes_in_capitals_are_of_the_format(local_db: Connection, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.parquet", ROWS.slice(0, 2))
    write(tmp_path / "rows" / "B.PARQUET", ROWS.slice(2))
    table = make_table(local_db, [4])
    table.load_columns(str(tmp_path / "rows"), "id", ["v"])
    assert by_id(table, "v") == {0: None, 1: "a", 2: "b", 3: "c"}


def test_columns_that_a_view_s_function_yields_are_not_loaded(local_db: Connection) -> None:
    @udtf(output_schema=pa.schema([("k", pa.int64()), ("n", pa.int64())]), partition_by="id")
    def rows(query: Any) -> Any:
        yield {"k": query.to_arrow()["id"][0].as_py(), "n": 1}

    source = local_db.create_table("source", pa.table({"id": [0, 1]}))
    view = local_db.create_udtf_view("v", source=source.query(), udtf=rows)
    view.refresh()
    with pytest.raises(UserInputError, match="comes from its query"):
        view.load_columns(pa.table({"k": [0], "n": [-1]}), "k", ["n"])


@pytest.mark.parametrize(
    ("source", "columns", "match"),
    [
        (None, ["v"], "source must be a path or URI"),
        (5, ["v"], "source must be a path or URI"),
        ({"id": [1]}, ["v"], "source must be a path or URI"),
        (ROWS, None, "columns must be names"),
        (ROWS, {"v": "w"}, "columns must be names"),
        (ROWS.rename_columns(["id", "ID"]), ["ID"], "only in case"),
        (ROWS.append_column("V", [["x"] * 3]), ["v", "V"], "can't be added together"),
        (pa.table([[1], [2], [3]], names=["id", "v", "v"]), ["v"], "several columns 'v'"),
    ],
)
def test_what_is_no_source_is_refused_in_a_sentence(
    local_db: Connection, source: Any, columns: Any, match: str
) -> None:
    with pytest.raises(UserInputError, match=match):
        make_table(local_db, [2]).load_columns(source, "id", columns)


MANY = pa.table({"id": range(2_000), "v": [str(i) * 9 for i in range(2_000)]})


def ipc_bytes(*, stream: bool) -> bytes:
    made = pa.BufferOutputStream()
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(made, MANY.schema) as writer:
        writer.write_table(MANY, max_chunksize=100)
    return bytes(made.getvalue())


def parquet_bytes() -> bytes:
    made = pa.BufferOutputStream()
    pq.write_table(MANY, made)
    return bytes(made.getvalue())


def overwritten(content: bytes, start: int, end: int) -> bytes:
    return content[:start] + bytes(end - start) + content[end:]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("b.parquet", parquet_bytes()[:1_000], UserInputError),
        ("b.parquet", overwritten(parquet_bytes(), 100, 1_000), UnreadableSourceError),
        ("b.parquet", b"", UserInputError),
        ("b.arrow", ipc_bytes(stream=False)[:9_000], UserInputError),
        ("b.arrow", overwritten(ipc_bytes(stream=False), 400, 9_000), UnreadableSourceError),
        ("b.arrow", ipc_bytes(stream=True)[:9_000], UnreadableSourceError),
        ("b.arrow", b"", UserInputError),
        ("b.arrow", b"no arrow" * 100, UserInputError),
    ],
)
def test_a_broken_file_of_a_folder_is_named(
    local_db: Connection, tmp_path: Path, name: str, content: bytes, error: type[GenevaError]
) -> None:
    table, folder = make_table(local_db, [[1, 2]]), tmp_path / "rows"
    folder.mkdir()
    whole = parquet_bytes() if name == "b.parquet" else ipc_bytes(stream=False)
    (folder / name.replace("b", "a")).write_bytes(whole)
    (folder / name).write_bytes(content)
    with pytest.raises(error, match=rf"{name} can't be read as (parquet|ipc): "):
        table.load_columns(folder, "id", ["v"])
    assert "v" not in lance.dataset(table.ref.uri).schema.names


def test_a_broken_table_is_named(local_db: Connection) -> None:
    source = local_db.create_table("source", ROWS)
    (file,) = Path(source.ref.uri, "data").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UnreadableSourceError, match=r"source\.lance can't be read as lance: "):
        make_table(local_db, [[1, 2]]).load_columns(source.ref.uri, "id", ["v"])


def replaced_lance(path: Path, rows: pa.Table) -> str:
    shutil.rmtree(path.with_suffix(".lance"), ignore_errors=True)
    return str(lance.write_dataset(rows, path.with_suffix(".lance")).uri)


def replaced_parquet(path: Path, rows: pa.Table) -> str:
    return write(path.with_suffix(".parquet"), rows)


def replaced_ipc(path: Path, rows: pa.Table) -> str:
    file = path.with_suffix(".arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    return str(file)


@pytest.mark.parametrize("make", [replaced_lance, replaced_parquet, replaced_ipc])
def test_a_source_that_is_replaced_after_the_plan_is_refused(
    local_db: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, pa.Table], str],
) -> None:
    """The same load of the first source would take the second one's values for its own."""
    table, path, real = make_table(local_db, [[1, 2]]), tmp_path / "rows", work.stage_source
    other = pa.table({"id": ROWS["id"], "v": ["x", "y", "z and more"]})
    source = make(path, ROWS)

    def replacing(*args: Any) -> Any:
        make(path, other)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(work, "stage_source", replacing)
        with pytest.raises(
            UnreadableSourceError, match=r"rows\.\w+ was replaced while it was read"
        ):
            table.load_columns(source, "id", ["v"])
    assert "v" not in lance.dataset(table.ref.uri).schema.names
    table.load_columns(source, "id", ["v"])
    assert column(table, "v") == ["x", "y"]


def test_a_table_that_grows_after_the_plan_is_loaded_as_it_was(
    local_db: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, real = make_table(local_db, [[1, 2, 4]]), work.stage_source
    source = replaced_lance(tmp_path / "rows", ROWS)

    def growing(*args: Any) -> Any:
        more = lance.write_dataset(pa.table({"id": [4], "v": ["d"]}), source, mode="append")
        more.delete("id = 1")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(work, "stage_source", growing)
        table.load_columns(source, "id", ["v"])
    assert column(table, "v") == ["a", "b", None]


def test_storage_options_that_are_none(local_db: Connection, tmp_path: Path) -> None:
    table, path = make_table(local_db, [[1]]), write(tmp_path / "rows.parquet")
    for given, why in ((5, "a mapping of names to values, not int"), ({"a": None}, "not NoneType")):
        with pytest.raises(UserInputError, match=f"storage_options.* {why}"):
            table.load_columns(path, "id", ["v"], storage_options=given)  # type: ignore[arg-type]


def test_a_handle_sees_the_columns_that_were_added_to_an_empty_table(local_db: Connection) -> None:
    table = local_db.create_table("empty", schema=pa.schema([("id", pa.int64())]))
    table.load_columns(ROWS, "id", ["v"])
    assert table.schema.names == ["id", "v"]
