"""The checkpoint store: keys for any names, and files that are believed only when whole."""

from __future__ import annotations

import base64
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lance.file import LanceFileWriter

import geneva.checkpoint
import geneva.checkpoint_utils
from geneva import Connection, Table, udf
from geneva.model.rows import RowRange
from geneva.storage.checkpoints.store import (
    CheckpointKey,
    CheckpointStore,
    InMemoryCheckpointStore,
    LanceCheckpointStore,
    WorkIdentity,
    _file_name,
    _key_of,
    checksum,
    index_keys,
    is_of_clause,
    is_of_column,
    is_of_computation,
    without_names,
    work_of,
)
from geneva.udf.types import without_json
from support import (
    Calls,
    checkpoint_keys,
    checkpoint_store,
    column,
    make_table,
    slow,
    tripled,
    uncommitted,
)

NAMES = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["", "_range-0-5", "a_frag-3_range-1-2", "..", "/", "../../etc", "😀" * 50, "%2F"]
    ),
)
IDENTITIES = st.builds(
    WorkIdentity,
    udf_name=NAMES,
    udf_version=NAMES,
    column=NAMES,
    where=NAMES,
    uri=NAMES,
    source_files=st.lists(NAMES, max_size=4).map(tuple),
    computation=NAMES,
)
RANGES = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)).map(lambda p: RowRange(*sorted(p))),
)
KEYS = st.builds(CheckpointKey, IDENTITIES.map(WorkIdentity.prefix), st.integers(0, 2**32), RANGES)


class TestKeys:
    @given(KEYS)
    def test_round_trip(self, key: CheckpointKey) -> None:
        assert CheckpointKey.parse(key.path()) == key

    @given(KEYS)
    def test_a_key_is_a_safe_path_of_short_names(self, key: CheckpointKey) -> None:
        path = _file_name(key.path())
        assert re.fullmatch(r"[A-Za-z0-9._+~=/-]+", path)
        segments = path.split("/")
        assert not {"", ".", ".."} & set(segments)
        assert max(map(len, segments)) <= 240, "the rest is for the writer's own suffix"
        assert _key_of(path) == key.path()

    @given(IDENTITIES)
    def test_a_prefix_has_the_parts_of_the_seed(self, identity: WorkIdentity) -> None:
        digest = r"[0-9a-f]{32}"
        name = r"(?:(?!_ver-|_col-|_where-)[^/~])*(?:~[0-9a-f]{10})?"
        assert re.fullmatch(
            rf"udf-{name}_ver-{name}_col-{name}_where-{digest}_uri-{digest}_srcfiles-{digest}",
            identity.prefix(),
        )

    @pytest.mark.parametrize(
        "name", ["compute_embedding", "_private_", "größe", "<lambda>", "a" * 100, "v1.2-b my udf"]
    )
    def test_names_stand_in_keys_as_people_write_them(self, name: str) -> None:
        prefix = WorkIdentity(name, name, name, "", "", (), "id").prefix()
        assert prefix.startswith(f"udf-{name}_ver-{name}_col-{name}_where-")

    @given(NAMES, NAMES, IDENTITIES)
    def test_the_column_of_a_key_is_known(
        self, one: str, other: str, identity: WorkIdentity
    ) -> None:
        prefix = replace(identity, column=one).prefix()
        assert is_of_column(prefix, one)
        assert is_of_column(prefix, other) == (one == other)

    def test_the_column_of_a_key_is_not_one_with_a_longer_name(self) -> None:
        for longer in ("a_b", "b_a", "x_col-a", "a_where-1"):
            prefix = WorkIdentity("f", "1", longer, "", "", (), "id").prefix()
            assert is_of_column(prefix, longer)
            assert not is_of_column(prefix, "a")

    @given(IDENTITIES, IDENTITIES)
    def test_different_work_has_different_keys(
        self, one: WorkIdentity, other: WorkIdentity
    ) -> None:
        same = (
            one.udf_name == other.udf_name
            and one.udf_version == other.udf_version
            and one.column == other.column
            and one.where == other.where
            and one.uri.rstrip("/") == other.uri.rstrip("/")
            and sorted(one.source_files) == sorted(other.source_files)
            and one.computation == other.computation
        )
        assert (one.prefix() == other.prefix()) == same

    @given(IDENTITIES, NAMES, NAMES, NAMES)
    def test_a_key_is_of_its_computation_whatever_it_is_called(
        self, identity: WorkIdentity, called: str, version: str, clause: str
    ) -> None:
        mine = replace(identity, computation="mine", udf_version=version, where=clause)
        prefix = replace(mine, column=called, udf_name=called).prefix()
        assert is_of_computation(prefix, "mine", version)
        assert not is_of_computation(prefix, "mine", f"{version}1")
        assert not is_of_computation(prefix, "yours")
        assert is_of_clause(prefix, clause)
        assert not is_of_clause(prefix, f"{clause}1")
        assert without_names(prefix) == without_names(mine.prefix())
        assert work_of(prefix) == work_of(replace(mine, where="other").prefix())
        for other in (replace(mine, udf_version="x"), replace(mine, computation="yours")):
            assert (work_of(prefix) == work_of(other.prefix())) == (mine == other)

    @given(st.text())
    @example("udf-a_frag-1_range-5-3")
    @example("udf-a_frag-01_range-1-3")
    @example("udf-a_frag-1_range-1")
    @example("udf-a_frag-1_range-1-3.lance")
    @example("udf-a_frag-1_range-1-3\n")
    @example("udf-a_frag-¹_range-1-3")
    @example("other_frag-1")
    def test_other_text_is_no_key_or_reads_as_itself(self, text: str) -> None:
        key = CheckpointKey.parse(text)
        assert key is None or key.path() == text

    @given(st.lists(st.one_of(KEYS.map(CheckpointKey.path), st.text(max_size=20)), unique=True))
    def test_an_index_holds_every_key_once(self, texts: list[str]) -> None:
        index = index_keys(texts)
        found = [key.path() for keys in index.values() for key in keys]
        assert sorted(found) == sorted(t for t in texts if CheckpointKey.parse(t) is not None)
        assert all(
            key.prefix == prefix and key.fragment_id == fragment
            for (prefix, fragment), keys in index.items()
            for key in keys
        )


@pytest.fixture(params=["memory", "lance"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "memory":
        return InMemoryCheckpointStore()
    return LanceCheckpointStore(str(tmp_path / "store"))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


class TestStores:
    def test_a_mapping_of_batches(self, store: CheckpointStore) -> None:
        assert store.list_keys() == []
        assert "udf-a" not in store
        with pytest.raises(KeyError):
            store["udf-a"]
        store["udf-a"], store["udf-b"], store["other"] = batch(1), batch(2), batch(3)
        assert store["udf-b"].equals(batch(2))
        assert "udf-a" in store
        assert 3 not in store
        assert store.list_keys() == ["other", "udf-a", "udf-b"]
        assert store.list_keys("udf-") == ["udf-a", "udf-b"]
        store["udf-a"] = batch(4)
        assert store["udf-a"].equals(batch(4))
        del store["udf-a"]
        assert "udf-a" not in store
        with pytest.raises(KeyError):
            del store["udf-a"]

    @pytest.mark.parametrize(
        "key", ["a b", "x/y", "..", "😀", "a%2Fb", "a=2Fb", "q?#", "a+b~c", "é/" * 200]
    )
    def test_any_key_comes_back(self, store: CheckpointStore, key: str) -> None:
        store[key] = batch(1)
        assert store.list_keys() == [key]
        assert store[key].equals(batch(1))

    def test_keys_are_listed_by_any_beginning(self, store: CheckpointStore) -> None:
        names = ["compute_embedding", "compute_embedding_of_a_very_long_name" * 3, "compute"]
        for name in names:
            prefix = WorkIdentity(
                name, "1", "a_column_with_a_long_name" * 3, "", "u", (), "id"
            ).prefix()
            store[CheckpointKey(prefix, 0, RowRange(0, 5)).path()] = batch(1)
        for name in names:
            (key,) = store.list_keys(f"udf-{name}_ver-")
            assert key in store
            assert store[key].equals(batch(1))
            assert CheckpointKey.parse(key) is not None
        assert len(store.list_keys("udf-compute_embedding_")) == 2
        for key in store.list_keys():
            del store[key]
        assert store.list_keys() == []

    def test_no_rows(self, store: CheckpointStore) -> None:
        store["k"] = batch()
        assert store["k"].num_rows == 0
        assert store["k"].schema == batch().schema


class FourMethods(geneva.checkpoint.CheckpointStore):
    """A store as the specification has it."""

    def __init__(self) -> None:
        self.batches: dict[str, pa.RecordBatch] = {}

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        self.batches[key] = value

    def __getitem__(self, key: str) -> pa.RecordBatch:
        return self.batches[key]

    def __contains__(self, key: object) -> bool:
        return key in self.batches

    def list_keys(self, prefix: str | None = None) -> list[str]:
        return [key for key in self.batches if key.startswith(prefix or "")]


def test_a_store_needs_four_methods() -> None:
    store = FourMethods()
    store["k"] = batch(1)
    del store["k"]
    assert "k" in store, "what can't be deleted stays"
    with pytest.raises(KeyError):
        del store["other"]


def test_a_users_keys_are_found_by_the_functions_name(local_db: Connection) -> None:
    table = make_table(local_db, [6])

    @udf
    def compute_embedding(id: int) -> int:
        return id

    table.add_columns({"an_embedding_with_a_long_name": compute_embedding})
    table.backfill("an_embedding_with_a_long_name", checkpoint_size=2, task_size=6)
    store = geneva.checkpoint.LanceCheckpointStore(f"{table.ref.uri}/_checkpoints")
    found = store.list_keys("udf-compute_embedding_")
    assert len(found) >= 3
    assert all("_col-an_embedding_with_a_long_name_where-" in key for key in found)
    keys = [geneva.checkpoint_utils.CheckpointKey.parse(key) for key in found]
    ranges = sorted((k.rows.start, k.rows.end) for k in keys if k is not None and k.rows)
    assert ranges == [(0, 2), (2, 4), (4, 6)]


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, None, False]),
    (pa.int8(), [1, None, -1]),
    (pa.float32(), [0.5, None, float("nan")]),
    (pa.string(), ["a", None, "", "é"]),
    (pa.large_binary(), [b"a", None, b""]),
    (pa.binary(2), [b"ab", None]),
    (pa.decimal128(10, 2), [None]),
    (pa.list_(pa.int64()), [[1, None], None, []]),
    (pa.list_(pa.float32(), 2), [[1.0, 2.0], None, [3.0, 4.0]]),
    (pa.list_(pa.list_(pa.string())), [[["a"], None], None, [[]]]),
    (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), [{"a": 1, "b": ["x"]}, None]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", None, "a"]),
    (pa.map_(pa.string(), pa.int64()), [[("k", 1)], None, []]),
    (pa.null(), [None, None]),
    (pa.timestamp("us", tz="UTC"), [0, None]),
]


class TestChecksums:
    @pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda v: str(v)[:24])
    def test_of_what_is_in_it_not_how_it_lies_in_memory(
        self, kind: pa.DataType, values: list[Any]
    ) -> None:
        array = pa.array(values, kind)
        padded = pa.concat_arrays([pa.nulls(3, kind), array, pa.nulls(2, kind)])
        whole = checksum(pa.record_batch([array], ["x"]))
        assert whole == checksum(pa.record_batch([padded.slice(3, len(values))], ["x"]))
        assert whole != checksum(pa.record_batch([array], ["y"]))
        if len(set(map(str, values))) > 1:
            turned = array.take(pa.array(range(len(values))[::-1]))
            if not turned.equals(array):
                assert whole != checksum(pa.record_batch([turned], ["x"]))

    @pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda v: str(v)[:24])
    def test_survives_the_file(self, kind: pa.DataType, values: list[Any], tmp_path: Path) -> None:
        store = LanceCheckpointStore(str(tmp_path))
        saved = pa.record_batch([pa.array(values, kind)], ["x"])
        store["k"] = saved
        assert str(store["k"].column(0).to_pylist()) == str(saved.column(0).to_pylist())


class TestDamage:
    """Whatever happens to a file, reading it gives its batch or a KeyError."""

    def damaged(self, folder: Path, data: bytes) -> pa.RecordBatch | None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "udf-k_frag-0_range-0-3.lance").write_bytes(data)
        store = LanceCheckpointStore(str(folder))
        assert store.list_keys() == ["udf-k_frag-0_range-0-3"]
        try:
            return store["udf-k_frag-0_range-0-3"]
        except KeyError:
            return None

    @pytest.fixture
    def saved(self, tmp_path: Path) -> bytes:
        store = LanceCheckpointStore(str(tmp_path / "whole"))
        store["udf-k_frag-0_range-0-3"] = self.content()
        (file,) = (tmp_path / "whole").iterdir()
        return file.read_bytes()

    @staticmethod
    def content() -> pa.RecordBatch:
        values = pa.array(["one", None, "three"])
        return pa.record_batch([values, pa.array([0, 1, 2], pa.uint64())], ["x", "_rowaddr"])

    def test_every_byte_flipped(self, saved: bytes, tmp_path: Path) -> None:
        assert self.damaged(tmp_path / "d", saved) is not None
        rng = np.random.default_rng(0)
        seen = 0
        for at in range(len(saved)):
            flipped = bytearray(saved)
            flipped[at] ^= int(rng.integers(1, 256))
            found = self.damaged(tmp_path / "d", bytes(flipped))
            # A byte of padding may change nothing; what is read is what was written.
            assert found is None or found.equals(self.content()), f"byte {at}"
            seen += found is None
        assert seen > len(saved) // 4

    def test_every_truncation(self, saved: bytes, tmp_path: Path) -> None:
        for size in range(0, len(saved), 7):
            assert self.damaged(tmp_path / "d", saved[:size]) is None

    @pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 4096, b"LANC" * 100, b"ARROW1\0\0"])
    def test_foreign_files(self, data: bytes, tmp_path: Path) -> None:
        assert self.damaged(tmp_path / "d", data) is None

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (pa.json_(), '{"a":  1}'),
            (pa.struct([("j", pa.json_()), ("n", pa.int8())]), {"j": "{}", "n": 1}),
            (pa.list_(pa.struct([("j", pa.json_())])), [{"j": "[ ]"}, None]),
            (pa.map_(pa.string(), pa.json_()), [("a", "{}")]),
        ],
        ids=str,
    )
    def test_json_reads_as_it_was_written(
        self, tmp_path: Path, kind: pa.DataType, value: Any
    ) -> None:
        store = LanceCheckpointStore(str(tmp_path))
        texts = pa.array([value, None], without_json(kind))
        values = texts.cast(kind)
        written = pa.record_batch([values, pa.array([0, 1])], ["x", "_rowaddr"])
        store["udf-k_frag-0_range-0-2"] = written
        assert store["udf-k_frag-0_range-0-2"].equals(written)

    @pytest.mark.parametrize(
        "schema",
        [
            "no base64!",
            base64.b64encode(b"no schema").decode(),
            base64.b64encode(pa.schema([("other", pa.json_())]).serialize()).decode(),
        ],
    )
    def test_a_schema_that_is_none_is_not_believed(self, tmp_path: Path, schema: str) -> None:
        key, values = "udf-k_frag-0_range-0-1", pa.record_batch([["{}"]], ["x"])
        writer = LanceFileWriter(str(tmp_path / f"{key}.lance"), values.schema)
        writer.add_schema_metadata("geneva.checkpoint.key", key)
        writer.add_schema_metadata("geneva.checkpoint.crc32", str(checksum(values)))
        writer.add_schema_metadata("geneva.checkpoint.schema", schema)
        writer.write_batch(values)
        writer.close()
        store = LanceCheckpointStore(str(tmp_path))
        assert key in store
        with pytest.raises(KeyError):
            store[key]

    def test_a_file_under_another_name_is_not_believed(self, tmp_path: Path) -> None:
        store = LanceCheckpointStore(str(tmp_path))
        store["udf-a"] = batch(1)
        shutil.copy(tmp_path / "udf-a.lance", tmp_path / "udf-b.lance")
        assert "udf-b" in store
        with pytest.raises(KeyError):
            store["udf-b"]

    def test_other_things_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        store = LanceCheckpointStore(str(tmp_path))
        (tmp_path / "notes.txt").write_text("hello")
        (tmp_path / "deeper").mkdir()
        store["udf-a"] = batch(1)
        assert "udf-a" in store.list_keys()
        assert index_keys(store.list_keys()) == {}


def break_file(path: Path, damage: str) -> None:
    data = path.read_bytes()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            middle = data.find(b"\x03\0\0\0\0\0\0\0") if len(data) > 8 else 0
            at = max(middle, 0)
            path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        case "foreign":
            path.write_text("not a lance file at all")
        case "gone":
            path.unlink()


@pytest.mark.parametrize(
    "damage",
    ["flipped", "gone", "swapped", slow("empty"), slow("truncated"), slow("foreign")],
)
class TestABackfillOverDamage:
    """Exactly the damaged ranges are computed again."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Table:
        """A table with 4 checkpoints of 3 rows in each of 2 fragments, and nothing committed."""
        table = make_table(local_db, [12, 12])
        table.add_columns({"x": tripled(calls)})

        with uncommitted(monkeypatch):
            table.backfill("x", checkpoint_size=3, task_size=12)
        store = checkpoint_store(table)
        for key in checkpoint_keys(table):
            if key.rows is None:
                del store[key.path()]
        assert len(checkpoint_keys(table)) == 8
        calls.clear()
        return table

    def test_the_damaged_ranges_run_again(self, table: Table, calls: Calls, damage: str) -> None:
        folder = Path(table.ref.uri) / "_checkpoints"
        victims = [k for k in checkpoint_keys(table) if k.rows in (RowRange(0, 3), RowRange(6, 9))]
        files = [folder / f"{key.path()}.lance" for key in victims]
        if damage == "swapped":
            contents = [file.read_bytes() for file in files]
            for file, content in zip(files, contents[1:] + contents[:1], strict=True):
                file.write_bytes(content)
        for file in files:
            break_file(file, damage)
        again = table.backfill("x", checkpoint_size=3, task_size=12)
        assert calls.rows == [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]
        assert (again.rows_computed, again.rows_reused) == (12, 12)
        assert column(table, "x") == [3 * i for i in range(24)]

    def test_in_fragments_that_several_tasks_share(
        self, table: Table, calls: Calls, damage: str
    ) -> None:
        if damage == "swapped":
            return
        folder = Path(table.ref.uri) / "_checkpoints"
        for key in checkpoint_keys(table):
            if key.rows == RowRange(3, 6):
                break_file(folder / f"{key.path()}.lance", damage)
        table.backfill("x", task_size=2)
        assert calls.rows == [3, 4, 5, 15, 16, 17]
        assert column(table, "x") == [3 * i for i in range(24)]
