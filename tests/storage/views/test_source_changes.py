"""What changed between two versions of a table: every way to change one, against a naive diff."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance import LanceOperation
from lance.file import LanceFileWriter

from geneva.errors import (
    ColumnNotFoundError,
    InvalidFilterError,
    TableChangedError,
    TableNotFoundError,
    UserInputError,
)
from geneva.model.digests import digest_rows
from geneva.model.tables import TableRef
from geneva.storage.columns.staged_files import data_file
from geneva.storage.lance.dataset import field_ids_of
from geneva.storage.lance.row_ids import RowIds, read_matching_ids, read_row_ids
from geneva.storage.lance.values import equal_rows
from geneva.storage.views import source_changes
from geneva.storage.views.source_changes import SourceChanges, read_changes

NAN = float("nan")
STRUCT = pa.struct([("k", pa.int32()), ("t", pa.list_(pa.string()))])
SCHEMA = pa.schema([("i", pa.int64()), ("x", pa.float64()), ("s", STRUCT)])
FLOATS = (0.0, -0.0, 1.5, NAN, None)
STRUCTS: tuple[Any, ...] = (
    None,
    {"k": 1, "t": ["a"]},
    {"k": None, "t": []},
    {"k": 1, "t": None},
    {"k": 2, "t": ["a", None]},
)

Plain = tuple[list[int], list[int], dict[str, list[int]]]


def rows(*keys: int, seed: int = 0) -> pa.Table:
    return pa.table(
        {
            "i": list(keys),
            "x": [FLOATS[(k + seed) % 5] for k in keys],
            "s": [STRUCTS[(k * 3 + seed) % 5] for k in keys],
        },
        schema=SCHEMA,
    )


def _kind(kind: pa.DataType) -> str:
    return "float" if pa.types.is_floating(kind) else str(kind)


class Source:
    """A table, and per version what each of its columns really is, whatever it is called."""

    def __init__(self, path: Path, *, stable: bool = True) -> None:
        self.ref = TableRef("source", str(path / "source.lance"))
        lance.write_dataset(
            rows(0, 1, 2, 3, 4, 5), self.ref.uri, enable_stable_row_ids=stable, max_rows_per_file=3
        )
        self._fresh = itertools.count()
        self._keys = itertools.count(100)
        self.columns = {1: {name: next(self._fresh) for name in SCHEMA.names}}
        self.now = dict(self.columns[1])

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.ref.uri)

    @property
    def version(self) -> int:
        return self.dataset.version

    def note(self) -> int:
        for version in range(max(self.columns) + 1, self.version + 1):
            self.columns[version] = dict(self.now)
        return self.version

    def other(self) -> str | None:
        """A column that may be altered: the last one."""
        names = [n for n in self.dataset.schema.names if n not in ("i", "s")]
        return names[-1] if names else None

    # -- the operations

    def append(self, seed: int) -> None:
        keys = [next(self._keys) for _ in range(seed % 3 + 1)]
        self._write(rows(*keys, seed=seed))

    def append_some(self, seed: int) -> None:
        lance.write_dataset(pa.table({"i": [next(self._keys)]}), self.ref.uri, mode="append")

    def _write(self, data: pa.Table) -> None:
        known = [n for n in data.column_names if n in self.dataset.schema.names]
        chosen = data.select(known)
        kinds = pa.schema([self.dataset.schema.field(n) for n in known])
        lance.write_dataset(chosen.cast(kinds), self.ref.uri, mode="append")

    def delete(self, seed: int) -> None:
        self.dataset.delete(f"i % 4 = {seed % 4}")

    def update(self, seed: int) -> None:
        name = self.other()
        if name is not None:
            self.dataset.update(
                {name: ["1.5", "NULL", "2", f"`{name}`"][seed % 4]}, f"i % 3 = {seed % 3}"
            )

    def upsert(self, seed: int) -> None:
        keys = {seed % 6, (seed + 3) % 6, next(self._keys)}
        data = rows(*keys, seed=seed)
        self._merge(data, insert=True)

    def upsert_one_column(self, seed: int) -> None:
        name = self.other()
        if name is not None:
            kind = self.dataset.schema.field(name).type
            data = {"i": [0, 1, 4], name: pa.array([seed, None, 1], kind)}
            self._merge(pa.table(data), insert=False)

    def _merge(self, data: pa.Table, *, insert: bool) -> None:
        known = [n for n in data.column_names if n in self.dataset.schema.names]
        if "s" in data.column_names and set(known) != set(self.dataset.schema.names):
            return
        kinds = pa.schema([self.dataset.schema.field(n) for n in known])
        # One row for a key, or the merge is ambiguous.
        keys = self.dataset.to_table(columns=["i"])["i"].to_pylist()
        if len(set(keys)) != len(keys):
            return
        merge = self.dataset.merge_insert("i").when_matched_update_all()
        merge = merge.when_not_matched_insert_all() if insert else merge
        merge.execute(data.select(known).cast(kinds))

    def compact(self, seed: int) -> None:
        options = [{}, {"materialize_deletions_threshold": 0.0}, {"target_rows_per_fragment": 4}]
        self.dataset.optimize.compact_files(**options[seed % 3])

    def replace(self, seed: int) -> None:
        name = self.other()
        if name is not None:
            self.replace_column(name, lambda k: [None, 1, 2, 1][(k + seed) % (seed % 4 + 1)])

    def replace_column(self, name: str, value: Callable[[int], Any]) -> None:
        """Put another file behind a column, as a backfill does."""
        dataset = self.dataset
        groups = []
        for fragment in dataset.get_fragments()[:2]:
            schema = pa.schema([dataset.schema.field(name)])
            file = f"{uuid.uuid4().hex}.lance"
            writer = LanceFileWriter(
                f"{dataset.uri}/data/{file}", schema, version=dataset.data_storage_version
            )
            values = [value(k) for k in range(fragment.physical_rows)]
            writer.write_batch(pa.record_batch([pa.array(values, schema[0].type)], schema=schema))
            writer.close()
            entry = data_file(dataset, file, field_ids_of(dataset)[name])
            groups.append(LanceOperation.DataReplacementGroup(fragment.fragment_id, entry))
        if groups:
            lance.LanceDataset.commit(
                dataset, LanceOperation.DataReplacement(groups), read_version=dataset.version
            )

    def add_empty(self, seed: int) -> None:
        self._add(pa.field(f"n{len(self.now)}", pa.float64()), f"n{len(self.now)}")

    def add_filled(self, seed: int) -> None:
        name = f"n{len(self.now)}"
        odd = f"CAST((i + {seed}) % 2 AS DOUBLE)"
        self._add({name: f"nullif({odd}, CAST(0 AS DOUBLE))"}, name)

    def _add(self, what: Any, name: str) -> None:
        if name not in self.now:
            self.dataset.add_columns(what)
            self.now[name] = next(self._fresh)

    def drop(self, seed: int) -> None:
        name = self.other()
        if name is not None:
            self.dataset.drop_columns([name])
            del self.now[name]

    def readd(self, seed: int) -> None:
        """Another column under the same name, and perhaps under the same field id."""
        name = self.other()
        if name is not None:
            self.drop(seed)
            self.note()
            # Not a constant alone: that makes a column that can't be NULL.
            filled = {name: f"nullif(CAST({seed} AS DOUBLE), CAST(i AS DOUBLE))"}
            self._add(pa.field(name, pa.float64()) if seed % 2 else filled, name)

    def rename(self, seed: int) -> None:
        name = self.other()
        if name is not None and f"r{seed}" not in self.now:
            self.dataset.alter_columns({"path": name, "name": f"r{seed}"})
            self.now[f"r{seed}"] = self.now.pop(name)

    def cast(self, seed: int) -> None:
        name = self.other()
        if name is not None:
            kind = self.dataset.schema.field(name).type
            other = pa.float32() if kind == pa.float64() else pa.float64()
            self.dataset.alter_columns({"path": name, "data_type": other})
            self.now[name] = next(self._fresh)

    def restore(self, seed: int) -> None:
        version = seed % self.version + 1
        lance.dataset(self.ref.uri, version=version).restore()
        self.now = dict(self.columns[version])

    def overwrite(self, seed: int) -> None:
        lance.write_dataset(rows(0, 1, 7, seed=seed), self.ref.uri, mode="overwrite")
        self.now = {name: next(self._fresh) for name in SCHEMA.names}

    def configure(self, seed: int) -> None:
        self.dataset.update_config({"a": str(seed)})

    def index(self, seed: int) -> None:
        self.dataset.create_scalar_index("i", "BTREE", replace=True)

    # -- the model

    def expected(self, old: int, new: int) -> tuple[list[str], Plain]:
        then, now = (self._cells(v) for v in (old, new))
        was, is_ = self.columns[old], self.columns[new]
        both = sorted(then.keys() & now.keys())
        changed = {}
        for name, what in is_.items():
            before = next((n for n, w in was.items() if w == what), name if name in was else None)
            paths = {name: before}
            if name == "s":
                paths |= {"s.k": "s.k" if before else None}
            for path, source in paths.items():
                changed[path] = [
                    r for r in both if now[r][path] != (then[r][source] if source else None)
                ]
        plain = sorted(now.keys() - then.keys()), sorted(then.keys() - now.keys()), changed
        return list(changed), plain

    def _cells(self, version: int) -> dict[int, dict[str, Any]]:
        """Every row's values, as texts that tell all of them apart, not widths; NULL is None."""
        dataset = lance.dataset(self.ref.uri, version=version)
        table = dataset.to_table(with_row_id=True)
        cells: dict[int, dict[str, Any]] = {}
        for row in table.to_pylist():
            values = {
                name: None if value is None else f"{_kind(table.schema.field(name).type)} {value!r}"
                for name, value in row.items()
            }
            if "s" in row:
                kind = (row["s"] or {}).get("k")
                values["s.k"] = None if kind is None else repr(kind)
            cells[row["_rowid"]] = values
        return cells

    def check(self, old: int, new: int) -> None:
        columns, expected = self.expected(old, new)
        assert plain(read_changes(self.ref, old, new, columns)) == expected, (old, new)


def plain(changes: SourceChanges) -> Plain:
    for ids in (changes.inserted, changes.deleted, *changes.changed.values()):
        assert ids.dtype == np.uint64
        assert np.all(ids[1:] > ids[:-1])
    return (
        changes.inserted.tolist(),
        changes.deleted.tolist(),
        {path: ids.tolist() for path, ids in changes.changed.items()},
    )


OPERATIONS = [
    "append",
    "append_some",
    "delete",
    "update",
    "upsert",
    "upsert_one_column",
    "compact",
    "replace",
    "add_empty",
    "add_filled",
    "drop",
    "readd",
    "rename",
    "cast",
    "restore",
    "overwrite",
    "configure",
    "index",
]
HISTORIES = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 23)), max_size=9)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two rows, so that few rows make many."""
    monkeypatch.setattr(source_changes, "window_rows", lambda *_: 2)
    monkeypatch.setattr(source_changes, "_IDS_AT_ONCE", 4)


def check_history(history: list[tuple[str, int]], pairs: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Source(Path(folder))
        for name, seed in history:
            getattr(source, name)(seed)
            source.note()
        last = source.version
        chosen = [(a % last + 1, b % last + 1) for a, b in pairs]
        for old, new in [(1, last), (last, 1), *chosen]:
            source.check(old, new)
        for tag, version in zip("ab", chosen[0] if chosen else (1, last), strict=True):
            source.dataset.tags.create(tag, version)
        source.dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)
        old, new = chosen[0] if chosen else (1, last)
        # Field ids alone can't tell a column that was dropped and added again from a renamed one.
        if not {"drop", "readd", "cast", "overwrite"} & {name for name, _ in history}:
            source.check(old, new)


PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(history=HISTORIES, pairs=PAIRS)
def test_random_histories(history: list[tuple[str, int]], pairs: list[tuple[int, int]]) -> None:
    check_history(history, pairs)


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(history=HISTORIES, pairs=PAIRS)
def test_many_random_histories(
    history: list[tuple[str, int]], pairs: list[tuple[int, int]]
) -> None:
    check_history(history, pairs)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_operation_there_and_back_and_compacted(source: Source, operation: str) -> None:
    for seed in range(2):
        getattr(source, operation)(seed)
        source.note()
    source.compact(0)
    last = source.note()
    for version in range(2, last + 1):
        source.check(1, version)
        source.check(version, 1)
        source.check(version - 1, version)


class Reads:
    """How many rows had their values compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compare = source_changes.equal_rows

        def counting(old: pa.Array, new: pa.Array) -> Any:
            self.count += len(old)
            return compare(old, new)

        monkeypatch.setattr(source_changes, "equal_rows", counting)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    return Reads(monkeypatch)


def test_append_delete_and_compaction_compare_no_values(source: Source, compared: Reads) -> None:
    for operation in ("append", "delete", "configure", "compact", "rename", "add_empty", "compact"):
        getattr(source, operation)(1)
        source.note()
    source.check(1, source.version)
    source.check(source.version, 1)
    assert compared.count == 0


def test_an_update_compares_the_rows_it_wrote(source: Source, compared: Reads) -> None:
    source.dataset.update({"x": "9.0"}, "i = 4")
    source.compact(0)
    new = source.note()
    changes = read_changes(source.ref, 1, new, ["x"])
    assert plain(changes) == ([], [], {"x": [4]})
    assert compared.count == 1


def test_a_backfill_of_another_column_changes_nothing(source: Source, compared: Reads) -> None:
    source.replace_column("x", lambda k: 7.0)
    source.compact(0)
    new = source.note()
    assert plain(read_changes(source.ref, 1, new, ["i", "s"])) == ([], [], {"i": [], "s": []})
    assert compared.count == 0, "though every row was stamped, and moved after that"
    source.check(1, new)


def test_a_backfill_of_a_watched_column(source: Source) -> None:
    old = source.version
    source.replace_column("x", lambda k: FLOATS[k % 5])
    same = [k for k in range(6) if repr(FLOATS[k % 3]) == repr(FLOATS[k % 5])]
    new = source.note()
    changed = sorted(set(range(6)) - set(same))
    assert plain(read_changes(source.ref, old, new, ["x"])) == ([], [], {"x": changed})


def test_deletions_that_agree_only_in_number(source: Source) -> None:
    source.dataset.delete("i = 1")
    one = source.note()
    source.restore(0)
    source.note()
    source.dataset.delete("i = 2")
    other = source.note()
    assert plain(read_changes(source.ref, one, other, ["x"])) == ([1], [2], {"x": []})


def test_a_dropped_column_that_comes_back_under_its_field_id(source: Source) -> None:
    source.add_filled(0)
    old = source.note()
    name = source.other()
    assert name is not None
    source.dataset.drop_columns([name])
    source.note()
    source.dataset.add_columns({name: "CAST(i AS DOUBLE) + 1"})
    source.now[name] = 99
    source.compact(0)
    new = source.note()
    assert plain(read_changes(source.ref, old, new, [name]))[2] == {name: list(range(6))}
    source.check(old, new)


def test_the_same_version_and_no_columns(source: Source) -> None:
    assert plain(read_changes(source.ref, 1, 1, ["x"])) == ([], [], {"x": []})
    source.append(0)
    assert plain(read_changes(source.ref, 1, 2, [])) == ([6], [], {})


def test_an_overwrite_is_all_new(source: Source) -> None:
    source.overwrite(0)
    inserted, deleted, changed = plain(read_changes(source.ref, 1, 2, ["x"]))
    assert (len(inserted), deleted, changed) == (3, list(range(6)), {"x": []})


def test_after_an_overwrite_equal_ids_are_other_rows(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lance 14 gives no id away twice; should it, no row is taken for another."""
    source.overwrite(0)
    monkeypatch.setattr(
        source_changes,
        "scan_ids",
        lambda dataset, *_: np.arange(6 if dataset.version == 1 else 3, dtype=np.uint64),
    )
    expected = ([0, 1, 2], [0, 1, 2, 3, 4, 5], {"x": [0, 1, 2], "i": [0, 1, 2]})
    assert plain(read_changes(source.ref, 1, 2, ["x", "i"])) == expected


def test_a_version_that_is_gone(source: Source) -> None:
    source.append(0)
    source.append(1)
    source.dataset.cleanup_old_versions(timedelta(0))
    with pytest.raises(TableChangedError, match=r"Version 1 of table 'source', which the view was"):
        read_changes(source.ref, 1, source.version, ["x"])
    with pytest.raises(TableChangedError, match=r"Version 2 .* which is to be read, is gone"):
        read_changes(source.ref, source.version, 2, ["x"])


def test_what_is_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ColumnNotFoundError, match="no column 'nope' at version 1; it has i, x, s"):
        read_changes(source.ref, 1, 1, ["nope"])
    with pytest.raises(TableNotFoundError):
        read_changes(TableRef("none", str(tmp_path / "none.lance")), 1, 2, [])
    plain_source = Source(tmp_path / "plain", stable=False)
    with pytest.raises(UserInputError, match="has no stable row ids"):
        read_changes(plain_source.ref, 1, 1, ["x"])


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_blobs_are_compared_by_their_bytes(tmp_path: Path, version: str) -> None:
    ref = TableRef("blobs", str(tmp_path / "blobs.lance"))
    blob = pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([("i", pa.int64()), blob, ("s", pa.struct([blob]))])

    def some(keys: list[int], values: list[bytes | None]) -> pa.Table:
        cells = {"i": keys, "b": values, "s": [{"b": value} for value in values]}
        return pa.table(cells, schema=schema)

    dataset = lance.write_dataset(
        some([0, 1, 2, 3], [b"aa", b"bb", None, b"dd"]),
        ref.uri,
        enable_stable_row_ids=True,
        data_storage_version=version,
    )
    paths = ["i", "b", "s", "s.b"]
    dataset.merge_insert("i").when_matched_update_all().execute(
        some([1, 2, 3], [b"xx", None, b"dd"])
    )
    unchanged: dict[str, list[int]] = {path: [] for path in paths}
    moved = plain(read_changes(ref, 1, lance.dataset(ref.uri).version, paths))
    assert moved == ([], [], unchanged | {"b": [1], "s": [1], "s.b": [1]})
    dataset = lance.dataset(ref.uri)
    dataset.add_columns({"j": "i"})
    dataset.optimize.compact_files()
    assert plain(read_changes(ref, 1, lance.dataset(ref.uri).version, paths)) == moved


# --- ids ----------------------------------------------------------------------------------------


def ids(*values: int) -> RowIds:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("stable", [True, False])
def test_ids_of_matching_rows(tmp_path: Path, stable: bool) -> None:
    source = Source(tmp_path, stable=stable)
    source.delete(1)
    source.update(0)
    dataset = source.dataset
    for where in (None, "i >= 2", "x IS NULL", "i > 99"):
        table = dataset.scanner(columns=["i"], filter=where, with_row_id=True).to_table()
        expected = sorted(table["_rowid"].to_pylist())
        assert read_row_ids(dataset, where).tolist() == expected
        every = read_row_ids(dataset, None)
        asked = np.union1d(every[::2], ids(77, 1 << 40))
        wanted = sorted(set(expected) & set(every[::2].tolist()))
        assert read_matching_ids(dataset, asked, where).tolist() == wanted


@pytest.mark.parametrize("where", ["nope > 1", "i +", "i", "i = 'a'"])
def test_a_wrong_condition(source: Source, where: str) -> None:
    refusals = []
    for read in (
        lambda: read_row_ids(source.dataset, where),
        lambda: read_matching_ids(source.dataset, ids(1), where),
        lambda: read_matching_ids(source.dataset, ids(), where),
    ):
        with pytest.raises(InvalidFilterError, match="can't be used on this table") as refused:
            read()
        refusals.append(str(refused.value))
    assert len(set(refusals)) == 1


def test_no_condition_gets_around_the_ids(source: Source) -> None:
    for where in ("i > 3 OR i = 1", "i > 3 OR i = 1 -- )"):
        assert read_row_ids(source.dataset, where).tolist() == [1, 4, 5]
        assert read_matching_ids(source.dataset, ids(1), where).tolist() == [1]
        assert read_matching_ids(source.dataset, ids(2), where).tolist() == []


def test_a_condition_with_an_interval(tmp_path: Path) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    times = pa.array([start + timedelta(days=d) for d in range(300)], pa.timestamp("us", "UTC"))
    dataset = lance.write_dataset(
        pa.table({"at": times}), str(tmp_path / "t.lance"), enable_stable_row_ids=True
    )
    where = "at >= timestamp '2026-01-01T00:00:00Z' + interval '2 days' -- really"
    assert read_row_ids(dataset, where).tolist() == list(range(2, 300))
    assert read_matching_ids(dataset, ids(1, 3), where).tolist() == [3]
    assert read_matching_ids(dataset, ids(*range(200)), where).tolist() == list(range(2, 200))


@given(chosen=st.sets(st.integers(0, 1100)))
@settings(max_examples=40, deadline=None)
def test_some_ids_of_a_bigger_table(chosen: set[int]) -> None:
    dataset = bigger_table()
    asked = ids(*sorted(chosen))
    expected = [i for i in sorted(chosen) if i < 1000 and i % 10 != 3 and i % 3 == 0]
    assert read_matching_ids(dataset, asked, "i % 3 = 0").tolist() == expected
    live = [i for i in sorted(chosen) if i < 1000 and i % 10 != 3]
    assert read_matching_ids(dataset, asked, None).tolist() == live


_BIGGER: list[lance.LanceDataset] = []


def bigger_table() -> lance.LanceDataset:
    if not _BIGGER:
        dataset = lance.write_dataset(
            pa.table({"i": range(1000)}),
            "memory://bigger",
            enable_stable_row_ids=True,
            max_rows_per_file=400,
        )
        dataset.delete("i % 10 = 3")
        _BIGGER.append(dataset)
    return _BIGGER[0]


# --- values -------------------------------------------------------------------------------------

CELLS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [0, 1, -1, None]),
    (pa.uint64(), [0, 2**64 - 1, None]),
    (pa.bool_(), [True, False, None]),
    (pa.float16(), [np.float16(0.0), np.float16(-0.0), np.float16("nan"), None]),
    (pa.float32(), [0.0, -0.0, NAN, 1.0, None]),
    (pa.float64(), [0.0, -0.0, NAN, 1.0, None]),
    (pa.string(), ["", "a", "b", None]),
    (pa.large_binary(), [b"", b"a", None]),
    (pa.binary(2), [b"ab", b"ba", None]),
    (pa.decimal128(9, 2), [1, 2, None]),
    (pa.date32(), [1, 2, None]),
    (pa.timestamp("us", "UTC"), [1, 2, None]),
    (pa.duration("s"), [1, 2, None]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None]),
    (pa.null(), [None]),
    (pa.list_(pa.float32(), 2), [[0.0, NAN], [0.0, None], [-0.0, NAN], None]),
    (pa.list_(pa.string()), [[], ["a"], ["a", None], [None], None]),
    (pa.large_list(pa.list_(pa.int8())), [[], [[]], [[1], None], [[1], []], None]),
    (pa.map_(pa.string(), pa.float32()), [[], [("a", NAN)], [("a", None)], [("b", NAN)], None]),
    (STRUCT, list(STRUCTS)),
    (pa.list_(STRUCT), [[], [STRUCTS[1]], [None], [STRUCTS[1], STRUCTS[4]], None]),
    (pa.struct([("o", STRUCT)]), [{"o": s} for s in STRUCTS] + [None]),
    (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a"], ["b", None], None]),
    (pa.month_day_nano_interval(), [(1, 2, 3), (1, 2, 4), None]),
]


@pytest.mark.parametrize(("kind", "cells"), CELLS, ids=lambda v: str(v)[:40])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_equality_of_all_types(kind: pa.DataType, cells: list[Any], data: st.DataObject) -> None:
    places = st.integers(0, len(cells) - 1)
    pairs = data.draw(st.lists(st.tuples(places, places), max_size=12))
    start = data.draw(st.integers(0, len(pairs)))
    old, new = (pa.array([cells[p[side]] for p in pairs], kind)[start:] for side in (0, 1))
    expected = [a == b for a, b in pairs[start:]]
    assert equal_rows(old, new).tolist() == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.int8()),
        (pa.int64(), pa.uint64()),
        (pa.float64(), pa.float32()),
        (pa.float32(), pa.float16()),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
        (pa.list_(pa.int64()), pa.large_list(pa.int8())),
        (pa.struct({"k": pa.int64()}), pa.struct({"k": pa.int32()})),
    ],
    ids=str,
)
def test_widths_make_no_difference(old: pa.DataType, new: pa.DataType) -> None:
    """As in the digests of receipts."""
    cells: list[Any] = [1, 2, None]
    if pa.types.is_struct(old):
        cells = [{"k": 1}, {"k": 2}, None]
    elif pa.types.is_list(old):
        cells = [[1], [1, None], None]
    elif not (pa.types.is_integer(old) or pa.types.is_floating(old)):
        cells = ["1", "", None]
    was = pa.array(cells, old)
    now = was.cast(new)
    assert equal_rows(was, now).tolist() == [True, True, True]
    other = now.take(pa.array([1, 0, 2]))
    assert equal_rows(was, other).tolist() == [False, False, True]
    assert (digest_rows([was], 0, 3) == digest_rows([now], 0, 3)).all()


def test_values_of_other_types_differ() -> None:
    numbers = pa.array([1, None])
    assert equal_rows(numbers, numbers.cast(pa.string())).tolist() == [False, True]
    assert equal_rows(numbers, numbers.cast(pa.float64())).tolist() == [False, True]
    large = pa.array([2**64 - 1], pa.uint64())
    assert equal_rows(large, pa.array([-1])).tolist() == [False]
    smaller = pa.array([{"k": 1}, None])
    assert equal_rows(smaller, pa.array([{"k": 1, "t": None}, None])).tolist() == [False, True]
