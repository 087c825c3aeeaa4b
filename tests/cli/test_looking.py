"""Commands that only look: they say what LanceDB would say, and import neither it nor pandas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import geneva
from command_line import invoke
from geneva.cli.summaries import list_tables, table_description
from geneva.connection import Connection
from geneva.console.queries import DatabaseReader
from geneva.errors import TableNotFoundError, UserInputError
from geneva.execution.backfill import chain
from geneva.execution.runner import InProcessRunner
from support import Calls, Prototypes, tripled

SLOW = {
    "lancedb",
    "lance_namespace",
    "pandas",
    "pyspark",
    "rich.progress",
    "geneva.execution.apply.batch",
    "geneva.execution.backfill.driver",
    "geneva.execution.evaluate",
    "geneva.execution.preview",
    "geneva.execution.refresh.run",
    "geneva.execution.worker.run",
}
"""What takes long to import, and a command that looks has no use for."""
LOOKING = [
    "tables {db}",
    "describe {db} t",
    "describe {db} v",
    "sample {db} t",
    "sample {db} t --columns id --where id>0",
    "plan {db} t x",
    "errors {db} t --job {job}",
    "jobs list {db}",
    "jobs show {db} {job}",
    "jobs logs {db} {job}",
    "view list {db}",
    "view plan {db} v",
    "trust list {db}",
]
PROGRAM = """
import json, sys
from geneva.cli import run
*commands, slow = map(json.loads, sys.argv[1:])
for command in commands:
    sys.argv = ["geneva", *command]
    try:
        run()
    except SystemExit as leaving:
        assert not leaving.code, command
    found = sorted(set(slow) & sys.modules.keys())
    assert not found, (command, found)
import pyarrow
assert len(pyarrow.table({"a": [1]}).to_pandas()) == 1, "pandas is hidden, and not gone"
"""


@pytest.fixture
def db(tmp_path: Path, prototypes: Prototypes) -> Connection:
    """A table with a computed column, and views of it: ours and LanceDB's."""
    prototypes.copy(a_table_and_views, tmp_path / "db")
    return geneva.connect(tmp_path / "db", runner=InProcessRunner)


def a_table_and_views(connection: Connection, prototypes: Prototypes) -> None:
    table = connection.create_table("t", pa.table({"id": [1, 2, 3]}))
    table.add_columns({"x": tripled(prototypes.calls())})
    table.backfill("x")
    table.add(pa.table({"id": [4]}))
    connection.create_materialized_view("v", table.query().where("id > 1")).refresh()
    connection.create_materialized_view("own", "t", select=["id"])


@pytest.fixture
def odd_db(db: Connection) -> Connection:
    """The same with a branch, and with folders that are no tables."""
    db.open_table("t").branches.create("trial")
    folder = Path(db.uri)
    for name in ("empty.lance", ".hidden.lance", "a name.lance", ".lance", "UP.LANCE"):
        (folder / name).mkdir()
    (folder / "left.lance/data").mkdir(parents=True)
    (folder / "file.lance").write_text("")
    return db


def test_they_import_nothing_slow(db: Connection) -> None:
    words = {"db": db.uri, "job": db.list_jobs(table_name="t")[0].job_id}
    commands = [[part.format(**words) for part in line.split()] for line in LOOKING]
    given = [json.dumps(value) for value in (*commands, sorted(SLOW))]
    environment = {**os.environ, "COLUMNS": "200"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr


def test_the_folder_says_what_lancedb_says(odd_db: Connection) -> None:
    looking = geneva.connect(odd_db.uri)._for_looking()
    assert looking.all_table_names() == odd_db.all_table_names()
    assert {"t", "t@trial", "v", "own", "empty", ".hidden"} <= set(looking.all_table_names())
    assert "left" not in looking.all_table_names(), "what a write left that failed"
    assert list_tables(looking) == list_tables(odd_db)
    for name in ("t", "t@trial", "v", "own"):
        mine, theirs = looking.open_table(name), odd_db.open_table(name)
        assert (type(mine), mine.ref, mine.version) == (type(theirs), theirs.ref, theirs.version)
        assert mine.schema.equals(theirs.schema, check_metadata=True)
        assert table_description(mine) == table_description(theirs)
        assert len(mine) == len(theirs)
        assert mine.search().to_arrow() == theirs.search().to_arrow(), "LanceDB's, all the same"
    assert looking.list_materialized_views() == odd_db.list_materialized_views()


@pytest.mark.parametrize("name", ["nope", "empty", "a name", "t@nope", "n$t"])
def test_what_is_wrong_is_said_in_the_same_words(odd_db: Connection, name: str) -> None:
    said = []
    for connection in (odd_db, geneva.connect(odd_db.uri)._for_looking()):
        with pytest.raises(Exception, match=r".") as error:
            connection.open_table(name)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


def test_namespaces_are_lancedbs(odd_db: Connection) -> None:
    odd_db.create_namespace(["n"])
    odd_db.create_table("inner", pa.table({"id": [1]}), namespace_path=["n"])
    looking = geneva.connect(odd_db.uri)._for_looking()
    assert "n$inner" in looking.all_table_names()
    assert looking.all_table_names() == odd_db.all_table_names()
    assert len(looking.open_table("n$inner")) == 1


def test_a_view_whose_source_is_gone_shows_what_there_is(db: Connection, calls: Calls) -> None:
    source = db.create_table("s", pa.table({"id": [1, 2]}))
    view = db.create_materialized_view(
        "w", source.query().select({"id": "id", "x": tripled(calls)})
    )
    view.refresh()
    view.add_columns({"y": tripled(calls)})
    whole = table_description(view)
    db.drop_table("s")
    described = table_description(view)
    assert described.keys() == whole.keys()
    assert described["columns"] == whole["columns"]
    assert described["view"].keys() == whole["view"].keys()
    assert whole["view"]["error"] is None
    assert "Table 's', the view's source, is not there" in described["view"]["error"]
    assert described["view"]["up_to_date"] is None
    columns = {column["name"]: column for column in described["computed_columns"]}
    assert columns["x"]["stale_rows"] is None
    assert columns["x"]["error"] == described["view"]["error"]
    assert (columns["y"]["stale_rows"], columns["y"]["error"]) == (2, None)

    def said(*command: str) -> str:
        found = invoke(command)
        assert found.exit_code == 0, found.output
        return found.stdout

    assert "can't be refreshed: Table 's'" in said("describe", db.uri, "w")
    assert json.loads(said("describe", db.uri, "w", "--json")) == described
    assert "can't be refreshed: Table 's'" in said("view", "list", db.uri)
    with pytest.raises(TableNotFoundError, match="the view's source"):
        view.refresh()


def test_views_that_are_made_from_each_other_are_not_up_to_date(db: Connection) -> None:
    query = db.create_table("s", pa.table({"id": [1, 2]})).query()
    inner = db.create_materialized_view("inner", query.select(["id"]))
    outer = db.create_materialized_view("outer", inner.query().select(["id"]))
    for view in (inner, outer):
        view.refresh()
    db.drop_table("inner")
    again = db.create_materialized_view("inner", outer.query().select(["id"]))
    with pytest.raises(UserInputError, match="made from each other"):
        again.refresh()
    onto = db.create_materialized_view("onto", outer.query().select(["id"]))
    onto.refresh()
    steps = {each.step.table: each for each in db.plan_refresh().steps}
    read = DatabaseReader(db.uri, None)
    for name, other in (("inner", "outer"), ("outer", "inner")):
        words = f"it and {other!r} are made from each other"
        assert words in steps[name].action
        found = table_description(db.open_table(name))["view"]
        assert words in found["error"]
        assert found["up_to_date"] is None
        assert words in invoke(("describe", db.uri, name)).stdout
        assert words in str(read.freshness(name).trouble)
    listed = json.loads(invoke(("view", "list", db.uri, "--json")).stdout)["views"]
    assert {line["name"]: line["up_to_date"] for line in listed if line["name"] in steps} == {
        "inner": None,
        "outer": None,
        "onto": True,
        "v": True,
    }


@pytest.mark.parametrize(
    ("command", "key"), [("tables", "tables"), ("view list", "views"), ("trust list", "functions")]
)
def test_lists_have_one_shape(odd_db: Connection, command: str, key: str) -> None:
    """What can't be read has the keys of all others: programs need not ask which there are."""
    odd_db.create_materialized_view("w", odd_db.create_table("s", [{"a": 1}]).query())
    shutil.rmtree(Path(odd_db.uri) / "s.lance")
    found = invoke([*command.split(), odd_db.uri, "--json"])
    lines = json.loads(found.stdout)[key]
    assert {line["error"] is None for line in lines} == {True, False}
    assert {tuple(line) for line in lines} == {tuple(lines[0])}


def test_a_table_is_read_as_often_for_many_columns_as_for_few(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_snapshot = chain.read_snapshot
    monkeypatch.setattr(
        chain, "read_snapshot", lambda *given: read.append(given[1].name) or read_snapshot(*given)
    )
    for name, columns in (("few", 2), ("many", 9)):
        table = local_db.create_table(name, pa.table({"id": [1, 2]}))
        table.add_columns({f"c{i}": tripled(calls) for i in range(columns)})
        found = table_description(table)["computed_columns"]
        assert [column["stale_rows"] for column in found] == [2] * columns
        DatabaseReader(local_db.uri, None).freshness(name)
    assert read == ["few"] * 3 + ["many"] * 3, "twice for a description, and once for its freshness"
    assert calls.count == 0
