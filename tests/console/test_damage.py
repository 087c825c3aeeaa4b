"""One bad thing is one bad line: in the lists of the command, of the console and of the library."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import lance
import pyarrow as pa
import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from command_line import invoke
from geneva.connection import Connection
from geneva.console import app
from support import Prototypes, make_table, tripled

STABLE = {"new_table_enable_stable_row_ids": "true"}
COMPUTED = {"virtual_column": "true", "virtual_column.format": "geneva-spark/1"}
BAD = ["computed", "empty", "manifest", "view_0", "view_1"]


@pytest.fixture
def folder(tmp_path: Path, prototypes: Prototypes) -> Path:
    """A database with a good table, a good view, and what nobody should have to see."""
    return Path(prototypes.copy(damaged, tmp_path / "db").uri)


def damaged(db: Connection, prototypes: Prototypes) -> None:
    table = make_table(db, [4], "good")
    table.add_columns({"c": tripled(prototypes.calls())})
    table.backfill("c")
    source = db.create_table("source", pa.table({"x": [1]}), storage_options=STABLE)
    db.create_materialized_view("a_view", source).refresh()
    folder = Path(db.uri)
    (folder / "empty.lance").mkdir()
    (folder / "manifest.lance" / "_versions").mkdir(parents=True)
    (folder / "manifest.lance" / "_versions" / "1.manifest").write_bytes(b"rubbish" * 10)
    column = pa.field("c", pa.int64(), metadata={**COMPUTED, "virtual_column.udf_inputs": "{"})
    write(folder, "computed", pa.schema([column]))
    for i, query in enumerate(("{", "[]")):
        metadata = {"geneva::view::query": query, "geneva::view::version": "2"}
        write(folder, f"view_{i}", pa.schema([pa.field("c", pa.int64())], metadata=metadata))
    jobs = str(folder / "_geneva" / "jobs.lance")
    row = {"job_id": "bad-job", "at": None, "kind": "created", "payload": "{"}
    schema = lance.dataset(jobs).schema
    lance.write_dataset(pa.Table.from_pylist([row], schema=schema), jobs, mode="append")


def write(folder: Path, name: str, schema: pa.Schema) -> None:
    lance.write_dataset(pa.table({"c": [1]}, schema=schema), str(folder / f"{name}.lance"))


@pytest.mark.parametrize("page", ["/", "/views", "/metrics", "/jobs", "/errors"])
def test_the_pages(folder: Path, page: str) -> None:
    client = TestClient(app(str(folder), hosts=["testserver"]))
    answer = client.get(page)
    assert answer.status_code == 200
    if page == "/":
        assert all(name in answer.text for name in ("good", "a_view", *BAD))
        assert "without a version of a table" in answer.text
    if page == "/metrics":
        assert 'geneva_table_rows{table="good"} 4' in answer.text
    if page == "/views":
        assert "a_view" in answer.text
    if page == "/jobs":
        assert "bad-job" in answer.text
        assert answer.text.count('href="/tables/good"') >= 1


@pytest.mark.parametrize("name", BAD)
def test_a_page_of_its_own(folder: Path, name: str) -> None:
    client = TestClient(app(str(folder), hosts=["testserver"]))
    assert client.get(f"/tables/{name}").status_code in (200, 404)
    assert client.get(f"/tables/{name}/freshness").status_code in (200, 404)
    assert client.get("/jobs/bad-job").status_code == 200


def test_the_command(folder: Path) -> None:
    def run(*args: str) -> str:
        result = invoke([*args, str(folder)])
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = run("tables")
    assert all(name in shown for name in ("good", "a_view", *BAD))
    assert "unreadable" in shown
    tables = {t["name"]: t for t in json.loads(run("tables", "--json"))["tables"]}
    assert tables["good"]["rows"] == 4
    assert tables["good"]["error"] is None
    assert tables["empty"]["error"]
    assert "a_view" in run("view", "list")
    assert "unreadable" in run("view", "list")
    assert "bad-job" in run("jobs", "list")


def test_the_library(folder: Path, local_db: Connection, caplog: pytest.LogCaptureFixture) -> None:
    assert "a_view" in local_db.list_materialized_views()
    assert "Table 'empty' is left out of the list of views" in caplog.text
    assert {job.table_name for job in local_db.list_jobs()} >= {"good"}
    assert local_db.open_table("good").plan_backfill("c").is_empty


ODD_JOBS: list[tuple[str | None, str | None, object]] = [
    ("line\nbreak\x1b[31m\n", "created", {"table": "t\nx", "column": "c", "type": "BACKFILL"}),
    (None, "created", {"table": "t", "column": "c"}),
    ("of-dicts", "created", {"table": {"a": [1]}, "column": ["x"], "config": {"w": {"d": 1}}}),
    ("of-dicts", "status", {"status": {"x": 1}, "error": {"m": "a\nb"}, "metrics": [1]}),
    ("numbers", "status", {"status": "RUNNING", "metrics": {"total": 1e300, "committed": "x"}}),
    ("waits", "waiting", {"for": {"x": 1}}),
    ("no-kind", None, {"status": "DONE"}),
    ("x" * 5_000, "created", {"table": "t"}),
]


def test_odd_jobs_are_a_line_each(folder: Path) -> None:
    jobs = str(folder / "_geneva" / "jobs.lance")
    at = datetime.now(UTC)
    rows = [
        {"job_id": job, "at": at, "kind": kind, "payload": json.dumps(payload)}
        for job, kind, payload in ODD_JOBS
    ]
    schema = lance.dataset(jobs).schema
    before = invoke(["jobs", "list", str(folder)]).output.splitlines()
    lance.write_dataset(pa.Table.from_pylist(rows, schema=schema), jobs, mode="append")
    listed = invoke(["jobs", "list", str(folder)])
    assert listed.exit_code == 0, listed.output
    lines = listed.output.splitlines()
    assert len(lines) == len(before) + len({job for job, _, _ in ODD_JOBS})
    assert "\x1b" not in listed.output
    assert max(map(len, lines)) < 300
    assert any(line.startswith(r"line\nbr") for line in lines)
    shown = invoke(["jobs", "show", str(folder), "line"])
    assert r"line\nbreak\x1b[31m\n" in shown.output.splitlines()[0]
    client = TestClient(app(str(folder), hosts=["testserver"]))
    for page in (
        "/jobs",
        "/errors",
        "/metrics",
        *(f"/jobs/{quote(j)}" for j, _, _ in ODD_JOBS if j),
    ):
        assert client.get(page).status_code == 200, page[:60]
