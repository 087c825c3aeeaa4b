"""A database and its tables: all of LanceDB, and nothing of geneva's own in the way."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from lancedb.index import BTree

import geneva
from geneva import Connection, Table
from geneva.asynchronous import AsyncTable
from geneva.cluster import GenevaCluster
from geneva.errors import (
    ColumnNotFoundError,
    JobNotFoundError,
    TableNotFoundError,
    UserInputError,
)
from geneva.execution.runner import InProcessRunner
from geneva.storage.lance.dataset import check_folder_is_there
from support import Calls, column, connect, make_table, tripled


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


class TestConnecting:
    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_path_is_text_or_a_path(self, tmp_path: Path, kind: type) -> None:
        db = geneva.connect(kind(tmp_path / "db"))
        db.create_table("t", rows(1))
        assert db.uri == str(tmp_path / "db")
        assert lancedb.connect(tmp_path / "db").open_table("t").count_rows() == 1

    def test_a_relative_path_stays_where_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        db = geneva.connect("db")
        db.create_table("t", rows(1))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert db.open_table("t").ref.uri == str(tmp_path / "db" / "t.lance")
        assert os.listdir(tmp_path / "elsewhere") == []  # noqa: PTH208

    @pytest.mark.parametrize("scheme", ["file:", "file://"])
    def test_a_file_uri_is_a_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        db = geneva.connect(f"{scheme}{tmp_path}/my%20db", runner=InProcessRunner)
        table = db.create_table("t", rows(1, 2))
        table.add_columns({"y": geneva.udf(data_type=pa.int64())(lambda id: id * 3)})
        table.backfill("y")
        assert column(table, "y") == [3, 6]
        assert db.uri == str(tmp_path / "my db")
        assert os.listdir(tmp_path) == ["my db"]  # noqa: PTH208  the history of jobs, too

    def test_a_home_is_a_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert geneva.connect("~/db").uri == str(tmp_path / "db")

    def test_connecting_and_looking_write_nothing(self, tmp_path: Path) -> None:
        db = geneva.connect(tmp_path / "db")
        assert (db.table_names(), db.list_jobs()) == ([], [])
        assert [p for p in (tmp_path / "db").rglob("*") if p.is_file()] == []

    @pytest.mark.parametrize("given", [5, "hush", [("a", "hush")], {"a": None}, {"a": b"hush"}])
    def test_options_that_are_none(self, local_db: Connection, given: Any) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "storage_options": lambda: geneva.connect(local_db.uri, storage_options=given),
            "storage_options ": lambda: local_db.create_table("t", [{}], storage_options=given),
            "storage_options  ": lambda: local_db.open_table("t", storage_options=given),
            "env": lambda: geneva.connect(local_db.uri, env=given),
            "env ": lambda: geneva.udf(lambda a: a, data_type=pa.int64(), env=given),
        }
        for option, call in calls.items():
            with pytest.raises(UserInputError, match=f"^{option.strip()}.* not ") as caught:
                call()
            assert "hush" not in str(caught.value)

    def test_what_no_job_could_run_with(self, tmp_path: Path) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"runner": InProcessRunner()}, "give the class, runner=InProcessRunner"),
            ({"runner": "spark"}, "runner is called to make a runner"),
            ({"spark": "local[2]"}, "spark must be a SparkSession, not str"),
            ({"settings": {"local_slots": 2}}, "settings must be .*, not dict"),
        ]
        for given, why in cases:
            with pytest.raises(UserInputError, match=why):
                geneva.connect(tmp_path / "db", **given)
        assert not (tmp_path / "db").exists()

    def test_secrets_do_not_show(self, tmp_path: Path) -> None:
        db = geneva.connect(tmp_path / "db", storage_options={"aws_secret_access_key": "hush"})
        table = db.create_table("t", rows(1))
        for text in (repr(db), repr(table), repr(table.ref), repr(vars(db))):
            assert "hush" not in text


@pytest.mark.parametrize(
    "read",
    [
        lambda table, query: query.to_arrow(),
        lambda table, query: query.where("id > 0").to_pandas(),
        lambda table, query: query.count_rows(),
        lambda table, query: list(query.to_batches()),
        lambda table, query: table.query().to_arrow(),
        lambda table, query: table.to_arrow(),
        lambda table, query: table.to_pandas(),
        lambda table, query: table.head(),
        lambda table, query: table.count_rows("id > 0"),
        lambda table, query: table.count_rows(),
        lambda table, query: len(table),
        lambda table, query: table.search().to_arrow(),
        lambda table, query: table.search().where("id > 0").limit(1).to_list(),
        lambda table, query: table.take_offsets([0]).to_arrow(),
        lambda table, query: table.take_row_ids([0]).to_list(),
        lambda table, query: asyncio.run(AsyncTable.of(table).query().to_list()),
        lambda table, query: table.limit(1).to_list(),
        lambda table, query: table.plan_backfill("x"),
        lambda table, query: table.preview("x"),
        lambda table, query: table.computed_columns(),
    ],
)
def test_a_table_whose_folder_was_deleted(
    local_db: Connection, calls: Calls, read: Callable[[Table, Any], Any]
) -> None:
    """Every way to read says that it is not there, and none which file was missed first."""
    table = make_table(local_db, [3])
    table.add_columns({"x": tripled(calls)})
    query = table.query().where("id >= 0")
    shutil.rmtree(table.ref.uri)
    with pytest.raises(TableNotFoundError, match="'t'"):
        read(table, query)


WRITES: list[Callable[[Table], Any]] = [
    lambda table: table.add(rows(9)),
    lambda table: table.add(rows(9), mode="overwrite"),
    lambda table: table.update(where="id = 1", values={"id": 5}),
    lambda table: table.delete("id = 1"),
    lambda table: table.delete("true"),
    lambda table: table.merge_insert("id").when_not_matched_insert_all().execute(rows(1, 9)),
    lambda table: table.add_columns({"y": "id + 1"}),
    lambda table: table.add_columns({"y": geneva.udf(lambda id: id, data_type=pa.int64())}),
    lambda table: table.alter_columns({"path": "id", "rename": "key"}),
    lambda table: table.replace_field_metadata("id", {"a": "b"}),
    lambda table: table.create_scalar_index("id"),
    lambda table: table.restore(1),
    lambda table: asyncio.run(AsyncTable.of(table).add(rows(9))),
    lambda table: asyncio.run(AsyncTable.of(table).delete("true")),
    lambda table: asyncio.run(merged(AsyncTable.of(table))),
]


async def merged(table: AsyncTable) -> Any:
    return await table.merge_insert("id").when_not_matched_insert_all().execute(rows(1, 9))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("has_written", [False, True])
def test_no_write_to_a_table_whose_folder_was_deleted(
    local_db: Connection, write: Callable[[Table], Any], has_written: bool
) -> None:
    """Lance would commit to a folder without data, and nobody could read that."""
    table = make_table(local_db, [3])
    if has_written:
        table.add(rows(7))
    shutil.rmtree(table.ref.uri)
    with pytest.raises(TableNotFoundError, match="'t'"):
        write(table)
    assert not Path(table.ref.uri).exists()


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES[:6])
def test_no_write_to_another_table_of_that_name(
    local_db: Connection, write: Callable[[Table], Any], others: int
) -> None:
    """Lance would put what it knows of the old one in its place: also with as many versions."""
    table = make_table(local_db, [3])
    table.add(rows(7))
    local_db.drop_table("t")
    made = local_db.create_table("t", rows(1, 2))
    for _ in range(others):
        made.add(rows(9))
    with pytest.raises(TableNotFoundError, match=r"'t' is not there any more.* open it again"):
        write(table)
    assert local_db["t"].to_arrow()["id"].to_pylist() == [1, 2, *[9] * others]


def test_a_handle_goes_on_when_what_it_has_read_was_cleaned_up(local_db: Connection) -> None:
    table, other = make_table(local_db, [3]), local_db["t"]
    other.add(rows(7))
    other.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    table.checkout_latest()
    table.add(rows(8))
    table.add(rows(9))
    assert sorted(local_db["t"].to_arrow()["id"].to_pylist())[-3:] == [7, 8, 9]


def test_a_count_asks_no_object_store(local_db: Connection) -> None:
    ref = make_table(local_db, [3]).ref
    check_folder_is_there(ref)
    check_folder_is_there(replace(ref, uri="s3://nowhere/t.lance"))
    with pytest.raises(TableNotFoundError, match="'t'"):
        check_folder_is_there(replace(ref, uri=f"{ref.uri}/nowhere"))


@pytest.mark.parametrize(
    "change",
    [
        {"path": "id", "virtual_column": 1},
        {"path": "id", "renmae": "key"},
        {"path": "id", "rename": "key", "type": "int32"},
        {"path": "id"},
        {"rename": "key"},
    ],
)
def test_alterations_that_say_nothing_are_refused(
    local_db: Connection, change: dict[str, Any]
) -> None:
    table = make_table(local_db, [3])
    with pytest.raises(UserInputError, match=r'"udf".*"rename", .*"data_type"; got'):
        table.alter_columns(change)
    assert (table.version, table.schema.names) == (1, ["id"])


def test_both_words_for_a_new_name(local_db: Connection) -> None:
    table = make_table(local_db, [3])
    for word, name in (("rename", "key"), ("name", "number")):
        (old,) = table.schema.names
        with pytest.raises(UserInputError, match="_rowid"):
            table.alter_columns({"path": old, word: "_rowid"})
        table.alter_columns({"path": old, word: name})
        assert table.schema.names == [name]


def test_a_damaged_table_is_there(local_db: Connection) -> None:
    table = make_table(local_db, [3])
    for file in Path(table.ref.uri, "data").iterdir():
        file.unlink()
    with pytest.raises((OSError, RuntimeError)):
        table.to_arrow()
    with pytest.raises(OSError, match="Not found"):
        table.query().to_arrow()


class TestMapping:
    def test_tables_by_name(self, local_db: Connection) -> None:
        assert len(local_db) == 0
        assert local_db
        make_table(local_db, [2])
        assert len(local_db) == 1
        assert isinstance(local_db["t"], geneva.Table)
        assert len(local_db["t"]) == 2
        assert ("t" in local_db, "u" in local_db, list(local_db)) == (True, False, ["t"])
        with pytest.raises(TableNotFoundError, match=r"no table 'u'.* Tables: t"):
            local_db["u"]


class TestCheckedOut:
    """A handle of an older version reads it, and writes nothing, as LanceDB's own."""

    @pytest.fixture
    def table(self, local_db: Connection, calls: Calls) -> Table:
        table = make_table(local_db, [2])
        table.add_columns({"x": tripled(calls)})
        table.add(rows(7))
        return table

    def test_nothing_is_written(self, local_db: Connection, table: Table, calls: Calls) -> None:
        old = table.version - 1
        table.tags.create("old", old)
        for pinned in (local_db.open_table("t", version=old), local_db["t"], local_db["t"]):
            if pinned.version != old:
                pinned.checkout(old if pinned.version % 2 else "old")
            for write in (
                lambda t: t.backfill("x"),
                lambda t: t.backfill_async("x"),
                lambda t: t.add_columns({"y": tripled(calls)}),
                lambda t: t.add_columns({"y": "id + 1"}),
                lambda t: t.alter_columns({"path": "x", "udf": tripled(calls)}),
                lambda t: t.alter_columns({"path": "x", "rename": "z"}),
                lambda t: t.drop_columns("x"),
                lambda t: t.compact_files(),
                lambda t: t.optimize(),
            ):
                with pytest.raises(UserInputError, match="is checked out"):
                    write(pinned)
            assert (pinned.version, len(pinned)) == (old, 2)
        assert calls.count == 0
        assert local_db["t"].version == table.version

    def test_what_is_read_is_of_then(self, table: Table, calls: Calls) -> None:
        table.backfill("x")
        table.checkout(2)
        assert table.plan_backfill("x").version == 2
        assert table.verify("x").total_rows == 2
        assert table.query().count_rows() == 2
        table.checkout_latest()
        assert table.plan_backfill("x").rows_to_compute == 0
        assert table.verify("x").total_rows == 3

    def test_the_latest_is_written_again(self, table: Table, calls: Calls) -> None:
        table.checkout(2)
        table.checkout_latest()
        table.backfill("x")
        assert calls.taken() == [0, 1, 7]
        table.checkout(2)
        table.restore()
        table.backfill("x")
        assert calls.count <= 2
        assert column(table, "x") == [0, 3]

    def test_a_job_that_ends_leaves_it_where_it_is(self, table: Table) -> None:
        future = table.backfill_async("x")
        table.checkout(2)
        future.result()
        assert table.version == 2

    def test_a_view(self, local_db: Connection, calls: Calls) -> None:
        source = make_table(local_db, [2], name="s", stable_row_ids=True)
        view = local_db.create_materialized_view("v", source)
        made = view.version
        view.refresh()
        refreshed = view.version
        view.checkout(made)
        for write in (view.refresh, view.refresh_async, view.plan_refresh):
            with pytest.raises(UserInputError, match="is checked out"):
                write()
        assert view.version == made
        assert local_db["v"].version == refreshed


def test_a_version_from_before_the_column(local_db: Connection, calls: Calls) -> None:
    table = make_table(local_db, [2])
    before = table.version
    table.add_columns({"x": tripled(calls)})
    for ask in (table.backfill, table.plan_backfill):
        with pytest.raises(ColumnNotFoundError, match="'x' did not exist yet in version 1 of"):
            ask("x", read_version=before)
    with pytest.raises(ColumnNotFoundError, match="'nope' is not defined"):
        table.backfill("nope", read_version=before)
    table.checkout(before)
    with pytest.raises(ColumnNotFoundError, match="did not exist yet"):
        table.plan_backfill("x")


class TestTables:
    def test_names_are_sorted_and_without_geneva_s_own(
        self, local_db: Connection, calls: Calls
    ) -> None:
        for name in ("b", "a", "c"):
            local_db.create_table(name, rows(1))
        table = local_db.open_table("a")
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        assert len(local_db.list_jobs()) == 1
        assert local_db.table_names() == ["a", "b", "c"]
        assert calls.count == 1

    def test_more_tables_than_a_page(self, local_db: Connection) -> None:
        names = [f"t{i:03}" for i in range(25)]
        for name in names:
            local_db.create_table(name, rows(1))
        assert local_db.table_names() == names

    def test_create_open_and_drop(self, local_db: Connection) -> None:
        local_db.create_table("t", rows(1, 2))
        with pytest.raises(ValueError, match="already exists"):
            local_db.create_table("t", rows(3))
        replaced = local_db.create_table("t", rows(3), mode="overwrite")
        assert column(replaced, "id") == [3]
        empty = local_db.create_table("e", schema=pa.schema([("id", pa.int64())]))
        assert (len(empty), empty.count_rows(), empty.name) == (0, 0, "e")
        local_db.drop_table("t")
        assert local_db.table_names() == ["e"]
        with pytest.raises(TableNotFoundError, match=r"no table 't' in .* Tables: e\.") as error:
            local_db.open_table("t")
        assert isinstance(error.value, UserInputError)

    def test_versions(self, local_db: Connection, calls: Calls) -> None:
        table = local_db.create_table("t", rows(1))
        first = table.version
        table.add(rows(2))
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        old = local_db.open_table("t", version=first)
        assert (old.version, len(old), old.schema.names) == (first, 1, ["id"])
        old.checkout_latest()
        assert old.to_arrow()["x"].to_pylist() == [3, 6]
        old.checkout(first)
        assert len(old) == 1
        assert calls.count == 2

    def test_everything_else_is_lancedb_s(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"x": tripled(calls)})
        table.add(rows(10, 11))
        table.delete("id = 0")
        table.update(where="id = 1", values={"id": 100})
        table.merge_insert("id").when_not_matched_insert_all().execute(
            pa.table({"id": [12], "x": pa.array([None], pa.int64())})
        )
        assert sorted(column(table, "id")) == [2, 3, 10, 11, 12, 100]
        assert table.count_rows("id > 10") == 3
        assert len(table) == 6
        table.backfill("x")
        assert sorted(calls.taken()) == [2, 3, 10, 11, 12, 100]
        assert [r["x"] for r in table.search().where("id = 12").to_list()] == [36]
        table.compact_files()
        table.optimize(cleanup_older_than=timedelta(days=1))
        assert sorted(table.to_pandas()["x"].tolist()) == [6, 9, 30, 33, 36, 300]
        assert table.backfill("x").rows_computed == 0
        assert calls.count == 0
        assert table.head(2).num_rows == 2

    def test_an_index_and_a_compaction(self, local_db: Connection, calls: Calls) -> None:
        table = make_table(local_db, [4, 4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        table.create_index("id", config=BTree())
        table.compact_files()
        assert len(table.list_indices()) == 1
        table.backfill("x")
        assert column(table, "x") == [3 * i for i in range(8)]
        assert calls.rows == list(range(8))

    def test_what_nobody_has(self, local_db: Connection) -> None:
        table = local_db.create_table("t", rows(1))
        for thing in (local_db, table):
            with pytest.raises(AttributeError, match="no_such_thing"):
                thing.no_such_thing  # noqa: B018

    def test_an_updated_input_runs_again_and_no_other(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [4], stable_row_ids=True)
        table.add_columns({"x": tripled(calls)})
        table.backfill("x")
        calls.clear()
        table.update(where="id = 1", values={"id": 100})
        table.backfill("x")
        assert calls.rows == [100]
        assert sorted(column(table, "x")) == [0, 6, 9, 300]


class TestStableRowIds:
    """Views need them, so new tables have them, unless somebody says otherwise."""

    @staticmethod
    def has(table: Table) -> bool:
        return bool(table.to_lance().has_stable_row_ids)

    def test_however_a_table_is_made(self, local_db: Connection) -> None:
        schema = pa.schema([("id", pa.int64())])
        local_db.create_namespace(["n"])
        made = [
            local_db.create_table("a", rows(1)),
            local_db.create_table("b", schema=schema),
            local_db.create_table("c", rows(1), storage_options={"aws_region": "x"}),
            local_db.create_table("d", rows(1), exist_ok=True),
            local_db.create_table("e", rows(1), mode="overwrite"),
            local_db.create_table("e", rows(1), mode="overwrite"),
            local_db.create_table("f", rows(1), namespace_path=["n"]),
        ]
        assert [self.has(table) for table in made] == [True] * len(made)

    @pytest.mark.parametrize(
        "name", ["new_table_enable_stable_row_ids", "enable_move_stable_row_ids"]
    )
    @pytest.mark.parametrize("value", ["false", False])
    def test_an_explicit_choice_wins(
        self, local_db: Connection, tmp_path: Path, name: str, value: object
    ) -> None:
        options: dict[str, Any] = {name: value}
        local_db.create_namespace(["n"])
        assert not self.has(local_db.create_table("a", rows(1), storage_options=options))
        inside = local_db.create_table("a", rows(1), storage_options=options, namespace_path=["n"])
        assert not self.has(inside)
        without = geneva.connect(tmp_path / "other", storage_options=options)
        assert not self.has(without.create_table("b", rows(1)))
        stable = {"new_table_enable_stable_row_ids": "true"}
        assert self.has(without.create_table("c", rows(1), storage_options=stable))

    def test_an_existing_table_keeps_what_it_has(self, local_db: Connection) -> None:
        make_table(local_db, [1], name="old")
        assert not self.has(local_db.create_table("old", rows(1), exist_ok=True))
        assert not self.has(local_db.create_table("old", rows(1), mode="overwrite"))

    def test_a_copy_has_them_and_computes_nothing(self, local_db: Connection, calls: Calls) -> None:
        old = make_table(local_db, [2, 3], name="old")
        old.add_columns({"x": tripled(calls)})
        old.backfill("x")
        old.delete("id = 1")
        assert calls.taken() == [0, 1, 2, 3, 4]
        with pytest.warns(UserWarning, match="no stable row IDs") as told:
            local_db.create_materialized_view("w", old)
        assert told[0].filename == __file__, "in the name of who makes the view"
        # The message says what to do; done, it works.
        call = re.search(r"db\.copy_table\('old', '[^']*'\)", str(told[0].message))
        assert call is not None
        copy = local_db.copy_table("old", "new")
        assert self.has(copy)
        assert copy.backfill("x").rows_computed == 0
        assert copy.verify("x").ok
        view = local_db.create_materialized_view("v", copy)
        view.refresh()
        copy.add(rows(9))
        copy.backfill("x")
        view.refresh()
        assert column(view, "x") == [0, 6, 9, 12, 27]
        assert calls.taken() == [9]

    def test_what_is_not_copied(self, local_db: Connection) -> None:
        source = local_db.create_table("t", rows(1))
        local_db.create_materialized_view("v", source)
        with pytest.raises(UserInputError, match="already"):
            local_db.copy_table("t", "v")
        with pytest.raises(UserInputError, match="is a view"):
            local_db.copy_table("v", "w")
        with pytest.raises(TableNotFoundError):
            local_db.copy_table("nope", "w")
        blobs = pa.schema(
            [pa.field("b", pa.large_binary(), metadata={"lance-encoding:blob": "true"})]
        )
        local_db.create_table("b", schema=blobs)
        with pytest.raises(UserInputError, match="blobs"):
            local_db.copy_table("b", "w")
        assert "w" not in local_db.table_names()


class TestFolderThatIsNotThere:
    """A path may be mistyped: who only looks makes nothing, and the first write makes it."""

    def test_a_look_makes_nothing(self, tmp_path: Path) -> None:
        db = connect(tmp_path / "no" / "db", InProcessRunner)
        assert (db.table_names(), db.all_table_names(), list(db), len(db)) == ([], [], [], 0)
        assert db.table_names(namespace_path=["inner"]) == []
        assert db.list_materialized_views() == []
        assert (db.list_jobs(), db.list_clusters(), db.list_manifests()) == ([], [], [])
        assert (db.refresh(), db.plan_refresh().steps) == ((), ())
        for name in ("t", "t@branch", "inner$t"):
            for call in (db.open_table, db.open_materialized_view, db.refresh):
                with pytest.raises(TableNotFoundError, match=r"there is no folder '.*/no/db'"):
                    call(name)
        with pytest.raises(JobNotFoundError):
            db.get_job("x")
        assert list(tmp_path.iterdir()) == []

    def test_nor_does_a_name_that_is_not_there(self, tmp_path: Path) -> None:
        db = connect(tmp_path / "no" / "db", InProcessRunner)
        with pytest.raises(AttributeError, match="Did you mean 'table_names'"):
            db.tabel_names()  # type: ignore[attr-defined]
        assert not hasattr(db, "_repr_html_"), "a notebook asks for it"
        assert list(tmp_path.iterdir()) == []

    def test_what_drops_and_renames_makes_nothing(self, tmp_path: Path) -> None:
        db = connect(tmp_path / "no" / "db", InProcessRunner)
        for call in (
            lambda: db.drop_table("t"),
            lambda: db.rename_table("t", "u"),
            lambda: db.drop_materialized_view("t"),
        ):
            with pytest.raises(ValueError, match=r"not found|there is no folder"):
                call()
        db.drop_table("t", ignore_missing=True)
        db.drop_all_tables()
        db.drop_database()
        assert list(tmp_path.iterdir()) == []

    def test_the_first_write_makes_it(self, tmp_path: Path) -> None:
        db, other = (connect(tmp_path / "no" / "db", InProcessRunner) for _ in range(2))
        assert other.table_names() == db.table_names() == []
        db.create_table("t", rows(2))
        assert db.table_names() == other.table_names() == ["t"]
        assert other.open_table("t").count_rows() == 1
        assert type(other._database) is type(db._database)

    def test_a_cluster_is_a_first_write(self, tmp_path: Path) -> None:
        db = connect(tmp_path / "no" / "db", InProcessRunner)
        db.define_cluster("c", GenevaCluster(cluster_type="local", name="c"))
        assert [cluster.name for cluster in db.list_clusters()] == ["c"]
        assert db.table_names() == []

    def test_a_place_that_can_be_no_folder_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for place in ("file", "file/db"):
            with pytest.raises(UserInputError, match="can't be opened"):
                connect(tmp_path / place, InProcessRunner)
