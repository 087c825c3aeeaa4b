"""Branches, clones and namespaces: what is done with one table touches no other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import geneva
from geneva import Connection, Table
from geneva.errors import TableNotFoundError, UDFError, UserInputError
from geneva.execution.backfill.committer import publish_columns
from geneva.model.jobs import JobStatus
from geneva.storage.lance.dataset import read_snapshot
from geneva.view import MaterializedView
from support import (
    Calls,
    breakable,
    by_id,
    column,
    counted,
    make_table,
    publishing,
    slow,
    tripled,
    uncommitted,
)
from view_support import numbers


def files_of(table: Table) -> dict[str, int]:
    """The files of a table itself, with their times: none of its branches, no tags."""
    root = Path(table.ref.uri)
    inside = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {
        str(path): (root / path).stat().st_mtime_ns
        for path in inside
        if not {"tree", "_refs"}.intersection(path.parts)
    }


@contextmanager
def untouched(*tables: Table) -> Iterator[None]:
    """Nothing may be written into these, nor removed."""
    before = [files_of(table) for table in tables]
    yield
    assert [files_of(table) for table in tables] == before


@pytest.fixture
def main(local_db: Connection, calls: Calls) -> Table:
    """Two fragments of three rows, with a computed column that is filled."""
    table = make_table(local_db, [3, 3], stable_row_ids=True)
    table.add_columns({"y": tripled(calls)})
    table.backfill("y")
    assert calls.taken() == [0, 1, 2, 3, 4, 5]
    return table


def tidy(table: Table) -> None:
    """Remove all but the latest version, as a user would."""
    dataset = lance.dataset(table.ref.uri)
    dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


def forget_old_versions(table: Table) -> None:
    """Remove the manifests that `tidy` keeps because a branch begins there."""
    latest = 2**64 - 1 - table.version
    for manifest in Path(table.ref.uri, "_versions").glob("*.manifest"):
        if int(manifest.stem) != latest:
            manifest.unlink()


def ids(*values: int) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


class TestColumns:
    @pytest.mark.parametrize("name", ["rel/v1.0", slow("rel"), slow("a/b/c")])
    def test_everything_happens_on_the_branch(
        self, local_db: Connection, main: Table, calls: Calls, name: str
    ) -> None:
        main.branches.create(name)
        with untouched(main):
            branch = local_db.open_table("t", branch=name)
            assert branch.plan_backfill("y").rows_to_compute == 0
            branch.add(ids(10))
            assert branch.backfill("y").rows_computed == 1
            assert calls.taken() == [10]
            branch.add_columns({"z": counted(calls, lambda y: y + 1, data_type=pa.int64())})
            branch.backfill("z")
            assert len(calls.taken()) == 7
            branch.update(where="id = 1", values={"id": 100})
            assert branch.backfill("z").rows_computed == 2  # y, and z which reads it
            assert branch.verify("y").ok
            assert branch.verify("z", run=True).ok
            branch.compact_files()
            assert branch.plan_backfill("z").rows_to_compute == 0
            branch.cleanup_checkpoints(timedelta(0))
            calls.clear()
            branch.alter_columns({"path": "z", "udf": tripled(calls)})
            branch.alter_columns({"path": "id", "rename": "key"})
            assert branch.backfill("z").rows_computed == 7
            branch.drop_columns("y")
        found = branch.query().to_arrow().to_pydict()
        assert dict(zip(found["key"], found["z"], strict=True)) == {
            k: 3 * k for k in (0, 2, 3, 4, 5, 10, 100)
        }
        assert by_id(main, "y") == {i: 3 * i for i in range(6)}
        assert main.schema.names == ["id", "y"]

    def test_main_goes_on_without_the_branch(self, main: Table, calls: Calls) -> None:
        branch = main.branches.create("rel")
        main.add(ids(6))
        main.backfill("y")
        main.alter_columns(
            {"path": "y", "udf": counted(calls, lambda id: -id, data_type=pa.int64())}
        )
        main.backfill("y")
        main.compact_files()
        tidy(main)
        main.cleanup_checkpoints(timedelta(0))
        calls.clear()
        assert by_id(branch, "y") == {i: 3 * i for i in range(6)}
        assert branch.backfill("y").rows_computed == 0
        assert branch.verify("y").ok
        assert by_id(main, "y") == {i: -i for i in range(7)}
        assert calls.count == 0

    def test_what_is_known_of_files_that_main_has(self, local_db: Connection, calls: Calls) -> None:
        """Which rows of a file are right, and which failed, is written in the file."""
        broken = Path(calls.path + ".broken")
        broken.write_text("[2]")
        main = make_table(local_db, [4])
        main.add_columns({"y": breakable(calls, broken, on_error=geneva.skip_on_error())})
        main.backfill("y", where="id > 0")
        calls.clear()
        rel = main.branches.create("rel")
        sub = rel.branches.create("sub", from_ref="rel")
        for branch in (rel, sub):
            plan = branch.plan_backfill("y")
            assert (plan.rows_to_compute, plan.checked_rows) == (1, 1)
            branch.backfill("y")
            assert calls.taken() == [0]
            assert column(branch, "y") == [0, 3, None, 9]
        broken.unlink()
        with untouched(main, rel):
            assert sub.backfill("y", retry_failed=True).rows_computed == 1
        assert calls.taken() == [2]
        assert column(sub, "y") == [0, 3, 6, 9]
        assert column(rel, "y") == [0, 3, None, 9]
        assert column(main, "y") == [None, 3, None, 9]

    def test_a_branch_of_a_branch(self, main: Table, calls: Calls) -> None:
        rel = main.branches.create("rel")
        rel.add_columns({"z": (tripled(calls), ["y"])})
        with untouched(main):
            sub = rel.branches.create("rel/fix", from_ref="rel")
            sub.add(ids(7))
            assert sub.backfill("z").rows_computed == 8  # the function of z is rel's, y's is main's
        assert by_id(sub, "z") == {i: 9 * i for i in (0, 1, 2, 3, 4, 5, 7)}
        assert column(rel, "z") == [None] * 6
        assert sub.ref.name == "t@rel/fix"

    def test_a_run_that_was_cut_off_goes_on(
        self, main: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        branch = main.branches.create("rel")
        branch.add(ids(*range(10, 20)))
        with untouched(main):
            with uncommitted(monkeypatch):
                branch.backfill("y", checkpoint_size=2)
            assert calls.taken() == list(range(10, 20))
            branch.compact_files()
            assert branch.backfill("y").rows_computed == 0
        assert calls.count == 0
        assert branch.verify("y").ok

    def test_leftovers_are_the_branchs_own(
        self, main: Table, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        branch = main.branches.create("rel")
        for table in (main, branch):
            table.add(ids(10))
            with uncommitted(monkeypatch):
                table.backfill("y", checkpoint_size=1)
        branch.drop_columns("y")
        with untouched(main):
            assert branch.cleanup_checkpoints(timedelta(0)).staged_files == 1
        calls.clear()
        assert main.backfill("y").rows_computed == 0
        assert calls.count == 0

    def test_files_of_branches_are_no_leftovers(self, main: Table) -> None:
        """A branch may be the only one that still has a file."""
        branch = main.branches.create("rel")
        sub = branch.branches.create("sub", from_ref="rel")
        for table in (main, branch):
            table.alter_columns({"path": "y", "udf": counted_negative()})
            table.backfill("y")
            tidy(table)
            forget_old_versions(table)
            table.cleanup_checkpoints(timedelta(0))
        assert by_id(sub, "y") == {i: 3 * i for i in range(6)}
        assert sub.verify("y").ok

    def test_equal_inputs_share_a_call_on_the_branch(
        self, local_db: Connection, calls: Calls
    ) -> None:
        main = make_table(local_db, [[1, 1, 2]], stable_row_ids=True)
        main.add_columns({"y": tripled(calls, memoize=True)})
        main.backfill("y")
        branch = main.branches.create("rel")
        calls.clear()
        branch.add(ids(1, 2, 3))
        branch.backfill("y")
        assert calls.taken() == [3]
        assert column(branch, "y") == [3, 3, 6, 3, 6, 9]


def counted_negative() -> geneva.UDF:
    @geneva.udf(data_type=pa.int64())
    def negative(id: int) -> int:
        return -id

    return negative


def test_workers_find_the_branch(db: Connection, calls: Calls) -> None:
    main = make_table(db, [2, 2])
    main.add_columns({"y": tripled(calls)})
    branch = main.branches.create("rel/v1")
    with untouched(main):
        branch.add(ids(9))
        assert branch.backfill("y").rows_computed == 5
    assert calls.taken() == [0, 1, 2, 3, 9]
    assert by_id(branch, "y") == {i: 3 * i for i in (0, 1, 2, 3, 9)}


class TestHandles:
    def test_names(self, local_db: Connection, main: Table) -> None:
        branch = main.branches.create("rel/v1")
        for same in (local_db.open_table("t@rel/v1"), main.branches.checkout("rel/v1")):
            assert isinstance(same, Table)
            assert same.ref == branch.ref
            assert same.name == "t"
            assert "t@rel/v1" in repr(same)
        assert local_db.open_table("t", branch="main").ref == main.ref
        assert sorted(main.branches.list()) == ["rel/v1"]
        pinned = main.branches.checkout("rel/v1", branch.version)
        with pytest.raises(UserInputError, match="checked out"):
            pinned.backfill("y")

    def test_jobs_and_errors_say_which_branch(
        self, local_db: Connection, main: Table, calls: Calls
    ) -> None:
        broken = Path(calls.path + ".broken")
        broken.write_text(json.dumps([1]))
        branch = main.branches.create("rel")
        branch.alter_columns({"path": "y", "udf": breakable(calls, broken)})
        with pytest.raises(UDFError, match="t@rel"):
            branch.backfill("y")
        assert [j.status for j in local_db.list_jobs("t@rel")] == [JobStatus.FAILED]
        assert [j.status for j in local_db.list_jobs("t")] == [JobStatus.DONE]
        assert [e.message for e in branch.get_errors()] == ["can't do 1"]
        assert branch.get_failed_row_addresses() == [1]
        assert main.get_errors() == []

    def test_a_branch_that_is_not_there(self, local_db: Connection, main: Table) -> None:
        branch = main.branches.create("rel")
        with pytest.raises(TableNotFoundError, match=r"no branch 'nope' of table t.*Branches: rel"):
            local_db.open_table("t", branch="nope")
        with pytest.raises(TableNotFoundError, match="no table 'u'"):
            local_db.open_table("u@rel")
        main.branches.delete("rel")
        with pytest.raises(TableNotFoundError, match="t@rel"):
            branch.backfill("y")
        assert main.backfill("y").rows_computed == 0

    def test_a_job_on_a_branch_pins_a_version_of_the_branch(
        self, local_db: Connection, main: Table, calls: Calls
    ) -> None:
        branch = main.branches.create("rel")
        seen: list[Any] = []

        def watch(*args: Any) -> Any:
            seen.extend(lance.dataset(main.ref.uri).tags.list().values())
            return publish_columns(*args)

        branch.add(ids(9))
        with publishing(local_db, watch):
            branch.backfill("y")
        assert [(tag["branch"], tag["version"]) for tag in seen] == [("rel", branch.version - 1)]
        assert lance.dataset(main.ref.uri).tags.list() == {}

    def test_a_branch_that_others_are_made_from_is_not_deleted(self, main: Table) -> None:
        main.branches.create("rel")
        for name in ("later", "last"):
            main.branches.create(name, from_ref="rel")
        with pytest.raises(UserInputError, match=r"'rel' of table 't'.*'last', 'later'"):
            main.branches.delete("rel")
        with pytest.raises(TableNotFoundError, match=r"no branch 'rels'\. Did you mean 'rel'"):
            main.branches.delete("rels")
        for name in ("later", "last", "rel"):
            main.branches.delete(name)
        assert main.branches.list() == {}

    def test_a_dead_job_keeps_no_branch(self, main: Table) -> None:
        branch = main.branches.create("rel")
        dataset = lance.dataset(branch.ref.uri)
        dataset.tags.create("geneva-job-dead.1", dataset.version)
        main.branches.delete("rel")
        assert main.branches.list() == {}
        assert lance.dataset(main.ref.uri).tags.list() == {}

    def test_a_job_on_a_branch_stops_no_clean_up_of_main(
        self, local_db: Connection, main: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        branch = main.branches.create("rel")
        main.add(ids(9))
        with uncommitted(monkeypatch):
            main.backfill("y")
        main.drop_columns("y")
        removed: list[int] = []

        def watch(*args: Any) -> Any:
            removed.append(main.cleanup_checkpoints(timedelta(0)).staged_files)
            return publish_columns(*args)

        branch.add(ids(9))
        with publishing(local_db, watch):
            branch.backfill("y")
        assert removed == [1]
        assert column(branch, "y")[-1] == 27

    def test_all_names(self, local_db: Connection, main: Table) -> None:
        main.branches.create("rel/v1")
        local_db.create_namespace(["a"])
        local_db.create_namespace(["a", "b"])
        inside = local_db.create_table("u", ids(1), namespace_path=["a", "b"])
        inside.branches.create("rel")
        names = local_db.all_table_names()
        assert names == ["t", "t@rel/v1", "a$b$u", "a$b$u@rel"]
        assert [local_db[name].ref.name for name in names] == names
        assert (len(local_db), list(local_db), "t" in local_db) == (1, ["t"], True)


class TestViews:
    def source(self, db: Connection) -> tuple[Table, Table]:
        options = {"new_table_enable_stable_row_ids": "true"}
        main = db.create_table("src", numbers(0, 4), storage_options=options)
        return main, main.branches.create("rel")

    def test_a_view_of_a_branch(self, local_db: Connection, calls: Calls) -> None:
        main, branch = self.source(local_db)
        branch.add(numbers(10, 12))
        main.add(numbers(100, 103))
        query = branch.query().where("id > 0").select(["id"]).add_column({"t": tripled(calls)})
        view = local_db.create_materialized_view("v", query)
        with untouched(main, branch):
            view.refresh()
            assert by_id(view, "t") == {i: 3 * i for i in (1, 2, 3, 10, 11)}
            assert calls.taken() == [1, 2, 3, 10, 11]
        assert query.to_arrow().sort_by("id")["id"].to_pylist() == [1, 2, 3, 10, 11]
        branch.update(where="id = 2", values={"id": 20})
        branch.delete("id = 3")
        main.delete("id > 0")
        calls.clear()
        again = local_db.open_table("v")
        assert isinstance(again, MaterializedView)
        assert again.plan_refresh().rows_leaving == 1
        again.refresh()
        assert calls.taken() == [20]
        assert by_id(again, "t") == {i: 3 * i for i in (1, 20, 10, 11)}
        assert again.definition.base_table == "src@rel"

    def test_a_branch_of_a_view(self, local_db: Connection, calls: Calls) -> None:
        main, _ = self.source(local_db)
        query = main.query().select(["id"]).add_column({"t": tripled(calls)})
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        branch = view.branches.create("next")
        assert isinstance(branch, MaterializedView)
        main.add(numbers(7, 9))
        calls.clear()
        with untouched(view):
            branch.refresh()
            assert calls.taken() == [7, 8]
            branch.add_columns({"u": (tripled(calls), ["t"])})
            branch.backfill("u")
        assert by_id(branch, "u") == {i: 9 * i for i in (0, 1, 2, 3, 7, 8)}
        assert by_id(view, "t") == {i: 3 * i for i in range(4)}
        calls.clear()
        view.refresh()
        assert calls.taken() == [7, 8]
        with pytest.raises(UserInputError, match=r"branches.delete\('next'\)"):
            local_db.drop_materialized_view("v@next")
        assert [j.table_name for j in local_db.list_jobs("v@next")] == ["v@next"] * 2

    def test_a_branch_of_a_chunked_view(self, local_db: Connection, calls: Calls) -> None:
        @geneva.chunker(output_schema=pa.schema([("part", pa.string())]))
        def letters(name: str) -> Iterator[dict[str, str]]:
            calls.note([name])
            yield from ({"part": letter} for letter in name)

        main, _ = self.source(local_db)
        view = local_db.create_udtf_view("v", main.query().select(["id"]), letters)
        view.refresh()

        def parts(of: Table) -> list[tuple[int, str]]:
            rows = of.to_arrow().to_pylist()
            return sorted((row["id"], row["part"]) for row in rows)

        def expected(*numbers: int) -> list[tuple[int, str]]:
            return sorted((i, letter) for i in numbers for letter in f"n{i}")

        first = view.branches.create("next")
        second = view.branches.create("later", from_ref="next")
        calls.clear()
        main.add(numbers(7, 8))
        with untouched(view):
            first.refresh()
            assert calls.taken() == ["n7"]
        assert parts(view) == expected(0, 1, 2, 3)
        assert parts(first) == expected(0, 1, 2, 3, 7)
        third = view.branches.create("last", from_ref="next")
        main.delete("id = 0")
        main.add(numbers(8, 9))
        for branch, called in ((third, ["n8"]), (second, ["n7", "n8"]), (first, ["n8"])):
            branch.refresh()
            assert calls.taken() == called
            assert parts(branch) == expected(1, 2, 3, 7, 8)
        view.refresh()
        assert parts(view) == expected(1, 2, 3, 7, 8)
        view.branches.delete("later")
        again = view.branches.create("later")
        main.delete("id = 1")
        again.refresh()
        assert parts(again) == expected(2, 3, 7, 8)
        hidden = f"{view.ref.root}/_chunks"
        assert len(lance.dataset(hidden).branches.list()) == 3
        for name in ("last", "next", "later"):
            view.branches.delete(name)
        assert lance.dataset(hidden).branches.list() == {}, "they go with the view's branches"
        assert parts(view) == expected(1, 2, 3, 7, 8)


class TestClones:
    def test_a_shallow_clone_knows_what_it_took_over(
        self, local_db: Connection, calls: Calls
    ) -> None:
        main = make_table(local_db, [4], stable_row_ids=True)
        main.add_columns({"y": tripled(calls)})
        main.backfill("y", where="id > 0")
        lance.dataset(main.ref.uri).shallow_clone(f"{local_db.uri}/c.lance", main.version)
        clone = local_db.open_table("c")
        calls.clear()
        with untouched(main):
            clone.add(ids(9))
            clone.backfill("y")
            assert calls.taken() == [0, 9]
            assert clone.verify("y").ok
            clone.cleanup_checkpoints(timedelta(0))
        assert by_id(clone, "y") == {i: 3 * i for i in (0, 1, 2, 3, 9)}


class TestNamespaces:
    def test_a_table_in_a_namespace_is_not_its_namesake(
        self, local_db: Connection, calls: Calls
    ) -> None:
        root = make_table(local_db, [2])
        local_db.create_namespace(["ns"])
        inside = local_db.create_table("t", ids(5, 6), namespace_path=["ns"])
        with untouched(root):
            inside.add_columns({"y": tripled(calls)})
            inside.backfill("y")
            branch = inside.branches.create("rel")
            branch.add(ids(7))
            branch.backfill("y")
        assert calls.taken() == [5, 6, 7]
        assert by_id(inside, "y") == {5: 15, 6: 18}
        assert inside.verify("y").ok
        assert [j.table_name for j in local_db.list_jobs()] == ["ns$t@rel", "ns$t"]
        for name, rows in (("ns$t", 2), ("ns$t@rel", 3)):
            assert len(local_db.open_table(name)) == rows
        assert local_db.table_names(namespace_path=["ns"]) == ["t"]
        with pytest.raises(TableNotFoundError, match=r"no table 'ns\$u'.*Tables: t"):
            local_db.open_table("u", namespace_path=["ns"])
        with pytest.raises(TableNotFoundError, match=r"no table 'other\$t'"):
            local_db.open_table("other$t")


class World:
    """A table or a branch, and what it should hold."""

    def __init__(self, table: Table, model: dict[int, int]) -> None:
        self.table, self.model = table, dict(model)
        self.factor = 3

    def step(self, rng: random.Random, calls: Calls) -> None:
        table, model = self.table, self.model
        match rng.choice(["add", "update", "delete", "backfill", "where", "compact", "alter"]):
            case "add":
                new = [rng.randrange(10_000) for _ in range(rng.randint(1, 4))]
                new = [i for i in dict.fromkeys(new) if i not in model]
                if new:
                    table.add(pa.table({"id": new, "x": new}))
                    model.update((i, i) for i in new)
            case "update" if model:
                target, value = rng.choice(sorted(model)), rng.randrange(10_000)
                table.update(where=f"id = {target}", values={"x": value})
                model[target] = value
            case "delete" if len(model) > 2:
                gone = rng.choice(sorted(model))
                table.delete(f"id = {gone}")
                del model[gone]
            case "backfill":
                table.backfill("y")
            case "where":
                table.backfill("y", where=f"id % 2 = {rng.randrange(2)}")
            case "compact":
                table.compact_files()
            case "alter":
                self.factor = rng.choice([2, 3, 5])
                table.alter_columns({"path": "y", "udf": scaled(calls, self.factor)})

    def check(self, calls: Calls) -> None:
        planned = self.table.plan_backfill("y").rows_to_compute
        calls.clear()
        assert self.table.backfill("y").rows_computed == calls.count <= planned
        found = self.table.query().to_arrow()
        keys = found["id"].to_pylist()
        assert dict(zip(keys, found["x"].to_pylist(), strict=True)) == self.model
        assert found["y"].to_pylist() == [self.factor * self.model[k] for k in keys]
        assert self.table.verify("y").ok
        assert self.table.backfill("y").rows_computed == 0


def scaled(calls: Calls, factor: int) -> geneva.UDF:
    def scale(x: int) -> int:
        return factor * x

    return counted(calls, scale, version=str(factor), input_columns=["x"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_histories_side_by_side(local_db: Connection, calls: Calls, seed: int) -> None:
    """Steps on main, on branches and on branches of these: each follows its own model."""
    rng = random.Random(seed)
    start = {i: i for i in range(6)}
    options = {"new_table_enable_stable_row_ids": str(bool(seed % 2)).lower()}
    data = pa.table({"id": list(start), "x": list(start)})
    main = local_db.create_table("t", data, storage_options=options)
    main.add_columns({"y": scaled(calls, 3)})
    worlds = [World(main, start)]
    for step in range(30):
        world = rng.choice(worlds)
        if step in (6, 12, 20):
            parent = world.table.ref.branch
            branch = main.branches.create(f"b/{step}", from_ref=parent)
            child = World(branch, world.model)
            child.factor = world.factor
            worlds.append(child)
        else:
            world.step(rng, calls)
    for world in rng.sample(worlds, len(worlds)):
        others = [other for other in worlds if other is not world]
        before = [read_snapshot(lance.dataset(w.table.ref.uri), w.table.ref) for w in others]
        world.check(calls)
        after = [read_snapshot(lance.dataset(w.table.ref.uri), w.table.ref) for w in others]
        assert [(s.version, s.fragments) for s in before] == [
            (s.version, s.fragments) for s in after
        ]
    for world in worlds:
        world.check(calls)
