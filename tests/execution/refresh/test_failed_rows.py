"""Rows of a view on which a function failed: found, and tried again when asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geneva import Connection, chunker, skip_on_error, udf
from geneva.execution.backfill.committer import publish_columns
from support import Calls, breakable, counted, publishing, tripled
from view_support import STABLE, make_source, numbers, values


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken"
    path.write_text(json.dumps([2, 5]))
    return path


def test_skipped_rows_of_a_view_are_tried_again(
    local_db: Connection, calls: Calls, broken: Path
) -> None:
    source = make_source(local_db, rows=8)
    fragile = breakable(calls, broken, on_error=skip_on_error())
    view = local_db.create_materialized_view("v", source.query().add_column({"t": fragile}))
    view.refresh()
    assert values(view) == {i: None if i in (2, 5) else i * 3 for i in range(8)}
    assert len(view.get_errors()) == 2
    calls.clear()
    assert view.refresh().rows_computed == 0
    assert view.plan_refresh().is_empty
    assert calls.count == 0
    broken.write_text(json.dumps([5]))
    assert view.plan_refresh(retry_failed=True).rows_to_run == 2
    view.refresh(retry_failed=True)
    assert calls.taken() == [2, 5]
    assert values(view) == {i: None if i == 5 else i * 3 for i in range(8)}
    broken.unlink()
    source.add(numbers(8, 10))
    view.refresh(retry_failed=True)
    assert calls.taken() == [5, 8, 9]
    assert values(view) == {i: i * 3 for i in range(10)}
    assert view.plan_refresh(retry_failed=True).is_empty
    assert view.refresh(retry_failed=True).rows_computed == 0


def test_a_row_is_tried_once_in_a_job(local_db: Connection, calls: Calls, broken: Path) -> None:
    """Also where other columns of the view are committed meanwhile."""
    source = make_source(local_db, rows=8)
    fragile = breakable(calls, broken, on_error=skip_on_error())
    query = source.query().add_column({"t": fragile}).add_column({"u": tripled(calls)})
    view = local_db.create_materialized_view("v", query)
    view.refresh(max_rows_per_fragment=2, commit_granularity=1)
    other = counted(calls, lambda id: -id, data_type=pa.int64())
    view.alter_columns({"path": "u", "udf": other})
    calls.clear()
    view.refresh(retry_failed=True, commit_granularity=1)
    assert calls.taken() == sorted([*range(8), 2, 5])


def test_a_backfill_tries_a_row_once_while_others_write(
    local_db: Connection, calls: Calls, broken: Path
) -> None:
    source = make_source(local_db, rows=8)
    source.add_columns({"t": breakable(calls, broken, on_error=skip_on_error())})
    source.backfill("t")
    calls.clear()

    def writing(*args: Any, **kwargs: Any) -> Any:
        local_db.open_table("src").add([{"id": 100, "name": "x"}])
        return publish_columns(*args, **kwargs)

    with publishing(local_db, writing):
        source.backfill("t", retry_failed=True)
    assert calls.taken() == [2, 5]


@pytest.fixture
def fragile_words(calls: Calls, broken: Path) -> Any:
    path = str(broken)

    @chunker(output_schema=pa.schema([("word", pa.string())]), on_error=skip_on_error())
    def words(id: int, text: str) -> Iterator[tuple[str]]:
        calls.note([id])
        if Path(path).exists() and id in json.loads(Path(path).read_text()):
            raise ValueError(f"can't read {id}")
        yield from ((word,) for word in text.split())

    return words


def test_documents_that_a_chunker_skipped(
    local_db: Connection, calls: Calls, broken: Path, fragile_words: Any
) -> None:
    data = pa.table({"id": range(7), "text": [f"a{i} b" for i in range(7)]})
    source = local_db.create_table("src", data, storage_options=STABLE)
    query = source.query().where("id > 0").select(["id"])
    view = local_db.create_udtf_view("v", query, fragile_words)
    view.refresh()
    assert len(view) == 8
    found = view.get_errors()
    assert [(e.table_name, e.column_name, e.exception_type) for e in found] == [
        ("v", "words", "ValueError")
    ] * 2
    assert {(*e.input_columns, *e.output_columns) for e in found} == {("id", "text", "word")}
    assert {e.table_version for e in found} == {source.version}, "that inputs were read from"
    # The address leads to the document.
    rows = source.search().where(f"_rowid in {tuple(e.row_id for e in found)}").to_arrow()
    assert sorted(rows["id"].to_pylist()) == [2, 5]
    assert view.get_failed_row_addresses() == [2, 5]
    assert len(view.get_errors(column_name="words")) == 2
    assert view.get_errors(column_name="id") == []
    assert len(view.get_errors(job_id=found[0].job_id)) == 2

    broken.write_text(json.dumps([5]))
    calls.clear()
    view.refresh()
    assert calls.count == 0
    assert view.plan_refresh(retry_failed=True).rows_to_run == 2
    view.refresh(retry_failed=True)
    assert calls.taken() == [2, 5]
    assert len(view) == 10
    source.delete("id = 5")
    view.refresh()
    assert Counter(e.row_id for e in view.get_errors()) == {2: 1, None: 2}


def test_columns_beside_a_chunker_and_added_to_its_view(
    local_db: Connection, calls: Calls, broken: Path
) -> None:
    @chunker(output_schema=pa.schema([("letter", pa.string())]))
    def letters(name: str) -> Any:
        return [(letter,) for letter in name]

    source = make_source(local_db, rows=6)
    fragile = breakable(calls, broken, on_error=skip_on_error())
    query = source.query().select({"id": "id", "t": fragile}).add_column(letters)
    view = local_db.create_materialized_view("v", query)
    view.refresh()
    assert [e.column_name for e in view.get_errors()] == ["t", "t"]

    def upper(letter: str) -> str:
        if letter == "n":
            raise ValueError(letter)
        return letter.upper()

    view.add_columns({"u": (udf(upper, on_error=skip_on_error()), ["letter"])})
    view.backfill("u")
    assert [e.column_name for e in view.get_errors()] == ["t"] * 2 + ["u"] * 6
    broken.unlink()
    view.refresh(retry_failed=True)
    assert values(view) == {i: i * 3 for i in range(6)}
