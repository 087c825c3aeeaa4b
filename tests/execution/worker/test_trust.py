"""User code runs on workers and nowhere else, only as it was stored, and needs no source there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileSession

from geneva import Connection, Table, udf
from geneva.errors import UDFIntegrityError
from geneva.execution.runner import InProcessRunner
from support import Calls, column, connect, counted, make_table, tripled


def touch(path: str) -> int:
    """What unpickling a `Trap` does."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    return 3


class Trap:
    """Something that is noticed when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return touch, (self.path,)


def trapped(path: Path) -> Any:
    trap = Trap(str(path))

    def times(id: int) -> int:
        return id * int(trap)  # type: ignore[call-overload]

    return udf(times, version="1")


class TestPlanningRunsNothing:
    def test_a_function_is_unpickled_by_workers_only(
        self, tmp_path: Path, local_db: Connection
    ) -> None:
        mark = tmp_path / "unpickled"
        table = make_table(local_db, [3])
        table.add_columns({"x": trapped(mark)})
        for _ in range(2):
            opened = connect(tmp_path / "db", InProcessRunner).open_table("t")
            opened.computed_columns()
            assert "x <- times" in repr(opened)
            assert opened.plan_backfill("x").rows_to_run == 3
            assert str(opened.plan_backfill("x", where="id > 0"))
            assert opened.backfill("x", where="id > 100").rows_computed == 0
            assert opened.count_rows() == 3
            opened.to_arrow()
            opened.add(pa.table({"id": [9]}))
            opened.delete("id = 9")
            opened.alter_columns({"path": "x", "rename": "y"})
            opened.alter_columns({"path": "y", "rename": "x"})
        assert not mark.exists()
        assert table.backfill("x").rows_computed == 3
        assert mark.exists(), "the trap works"
        assert column(table, "x") == [0, 3, 6]


class TestTampering:
    def stored(self, table: Table) -> str:
        return table.computed_columns()["x"].udf_digest

    def rewrite(self, table: Table, data: bytes) -> None:
        """Replace the stored function by a readable file with other bytes in it."""
        digest = self.stored(table)
        (Path(table.ref.uri) / "_udfs" / f"{digest}.lance").unlink()
        session = LanceFileSession(f"{table.ref.uri}/_udfs")
        schema = pa.schema([pa.field("pickled_udf", pa.large_binary())])
        writer = session.open_writer(f"{digest}.lance", schema=schema)
        writer.write_batch(pa.record_batch([pa.array([data], pa.large_binary())], schema=schema))
        writer.close()

    def test_other_bytes_are_refused_unread(
        self, db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        from geneva.udf.declare import serialize_udf

        mark = tmp_path / "unpickled"
        table = make_table(db, [3])
        table.add_columns({"x": tripled(calls)})
        self.rewrite(table, serialize_udf(trapped(mark)))
        with pytest.raises(UDFIntegrityError, match="altered or cut short"):
            table.backfill("x")
        assert not mark.exists()
        assert calls.count == 0
        assert column(table, "x") == [None] * 3
        table.alter_columns({"path": "x", "udf": tripled(calls, version="again")})
        table.backfill("x")
        assert calls.count == 3

    @pytest.mark.parametrize("damage", ["gone", "empty", "cut", "text"])
    def test_a_file_that_is_gone_or_damaged(
        self, local_db: Connection, calls: Calls, damage: str
    ) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        file = Path(table.ref.uri) / "_udfs" / f"{self.stored(table)}.lance"
        data = file.read_bytes()
        if damage == "gone":
            file.unlink()
        else:
            kinds = {"empty": b"", "cut": data[: len(data) // 2], "text": b"hello"}
            file.write_bytes(kinds[damage])
        with pytest.raises(UDFIntegrityError, match="can't be read"):
            table.backfill("x")
        assert calls.count == 0

    def test_a_digest_that_was_changed_in_the_metadata(
        self, local_db: Connection, calls: Calls, tmp_path: Path
    ) -> None:
        table = make_table(local_db, [3])
        table.add_columns({"x": tripled(calls)})
        dataset = lance.dataset(table.ref.uri)
        dataset.update_field_metadata({"x": {"virtual_column.udf": "_udfs/../../../evil"}})
        table.checkout_latest()
        with pytest.raises(UDFIntegrityError):
            table.backfill("x")
        assert calls.count == 0


class TestOtherProcesses:
    def python(self, code: str, *args: object, cwd: Path) -> str:
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
            capture_output=True,
            text=True,
            cwd=cwd,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    @pytest.mark.slow
    def test_a_definition_outlives_its_source(self, tmp_path: Path) -> None:
        source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
        source.mkdir()
        elsewhere.mkdir()
        (source / "mine.py").write_text(
            textwrap.dedent(
                """
                import pyarrow as pa
                from geneva import udf
                FACTOR = 7
                def helper(value):
                    return value * FACTOR
                class Model:
                    def setup(self):
                        self.offset = 1000
                    def __call__(self, id: int) -> int:
                        return helper(id) + self.offset
                @udf
                def seven(id: int) -> int:
                    return helper(id)
                model = udf(Model, data_type=pa.int64())()
                """
            )
        )
        define = """
            import sys, pyarrow as pa, geneva, mine
            table = geneva.connect(sys.argv[1]).create_table("t", pa.table({"id": [1, 2]}))
            table.add_columns({"x": mine.seven, "y": mine.model})
            print(mine.seven.version, mine.model.version)
            """
        versions = self.python(define, tmp_path / "db", cwd=source)
        (source / "mine.py").unlink()
        run = """
            import sys, geneva
            from geneva.execution.runner import InProcessRunner
            table = geneva.connect(sys.argv[1], runner=InProcessRunner).open_table("t")
            columns = table.computed_columns()
            print(columns["x"].udf_version, columns["y"].udf_version)
            assert table.backfill("x").rows_computed == 2
            assert table.backfill("y").rows_computed == 2
            assert table.to_arrow()["x"].to_pylist() == [7, 14]
            assert table.to_arrow()["y"].to_pylist() == [1007, 1014]
            assert "mine" not in sys.modules
            """
        assert self.python(run, tmp_path / "db", cwd=elsewhere) == versions


@pytest.mark.parametrize(
    "name",
    ["it's", 'say "x"', "a b", "😀", "x" * 100, "ünïcode", "a/b", "%41", "-- x", "_range-1-2"],
)
def test_names_of_columns_and_functions(local_db: Connection, calls: Calls, name: str) -> None:
    """Of clauses, too: they end up in SQL, in file names and in messages."""
    data = pa.table({name: pa.array([1, 2, 3], pa.int64())})
    table = make_table(local_db, [data])
    out = f"{name} out"
    times = counted(calls, lambda value: value * 3, data_type=pa.int64(), name=name, version=name)
    table.add_columns({out: (times, [name])})
    table.backfill(out, where=f"`{name}` = 2", checkpoint_size=1)
    table.backfill(out, checkpoint_size=1)
    assert column(table, out) == [3, 6, 9]
    assert calls.rows == [1, 2, 3]
    assert local_db.list_jobs("t")[0].column_name == out
    assert table.computed_columns()[out].udf_name == name


@pytest.mark.parametrize("name", ["it's", "a b", "😀", "a.b", "a-b", "x" * 100])
def test_names_of_tables(local_db: Connection, calls: Calls, name: str) -> None:
    data = pa.table({"id": pa.array([0, 1], pa.int64())})
    if re.search(r"[^\w.-]", name, re.ASCII):
        with pytest.raises(ValueError, match="name"):  # LanceDB's rule, and its message
            local_db.create_table(name, data)
        return
    table = local_db.create_table(name, data)
    assert local_db.table_names() == [name]
    table.add_columns({"x": tripled(calls)})
    table.backfill("x", checkpoint_size=1)
    assert column(table, "x") == [0, 3]
    assert local_db.list_jobs(name)[0].table_name == name
    assert local_db.open_table(name).backfill("x").rows_computed == 0
    assert calls.count == 2
