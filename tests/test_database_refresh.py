"""`db.refresh()`: everything computed brought up to date, in order, at the cost of what changed."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import geneva
from geneva import Columns, Connection, Table, udf
from geneva.cli import app
from geneva.cli import refresh as cli_refresh
from geneva.errors import (
    IncompleteRefreshError,
    JobCancelledError,
    TableNotFoundError,
    TypeMismatchError,
    UnknownOptionError,
    UserInputError,
)
from geneva.execution.backfill import chain
from geneva.execution.runner import InProcessRunner
from geneva.planning.backfill import BackfillPlan
from support import Calls, column, connect, tripled


def made(db: Connection, calls: Calls, rows: int = 4) -> Table:
    """A table with a chain of two columns, a view with a column of its own, and a view of that."""
    table = db.create_table("texts", pa.table({"id": range(rows)}))

    @udf
    def doubled(id: int) -> int:
        calls.note([f"doubled {id}"])
        return 2 * id

    @udf
    def more(doubled: int) -> int:
        calls.note([f"more {doubled}"])
        return doubled + 1

    @udf
    def of_view(more: int) -> int:
        calls.note([f"of view {more}"])
        return -more

    table.add_columns({"doubled": doubled})
    table.add_columns({"more": more})
    view = db.create_materialized_view("some", table.query().where("id > 1").select(["id", "more"]))
    view.add_columns({"of_view": of_view})
    db.create_materialized_view("fewer", view.query().where("of_view < -6").select(["of_view"]))
    return table


def names(db: Connection) -> list[str]:
    """What jobs there were, oldest first."""
    jobs = sorted(db.list_jobs(), key=lambda job: job.created_at)
    return [f"{job.table_name}.{job.column_name}" for job in jobs]


def test_everything_is_computed_in_order(local_db: Connection, calls: Calls) -> None:
    made(local_db, calls)
    results = local_db.refresh()
    assert [result.rows_computed for result in results] == [4, 4, 0, 2, 0]
    assert names(local_db) == ["texts.doubled", "texts.more", "some.*", "some.of_view", "fewer.*"]
    assert column(local_db.open_table("texts"), "more") == [1, 3, 5, 7]
    assert column(local_db.open_table("some"), "of_view") == [-5, -7]
    assert column(local_db.open_table("fewer"), "of_view") == [-7]
    assert calls.count == 10


def test_nothing_to_do_is_no_job(local_db: Connection, calls: Calls) -> None:
    made(local_db, calls)
    local_db.refresh()
    before = len(local_db.list_jobs())
    assert local_db.refresh() == ()
    assert local_db.plan_refresh().is_empty
    assert len(local_db.list_jobs()) == before
    assert calls.count == 10


@pytest.mark.parametrize("columns", [3, 12])
def test_columns_of_a_table_are_planned_on_one_reading(
    columns: int, local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = local_db.create_table("t", pa.table({"id": range(4)}))
    for i in range(columns):
        table.add_columns({f"c{i}": tripled(calls, input_columns=[f"c{i - 1}" if i else "id"])})
    table.backfill(f"c{columns - 1}")
    opened, read = [], []
    open_lance, read_snapshot = lance.dataset, chain.read_snapshot
    monkeypatch.setattr(lance, "dataset", lambda *a, **o: opened.append(a) or open_lance(*a, **o))
    monkeypatch.setattr(chain, "read_snapshot", lambda *a: read.append(a) or read_snapshot(*a))
    assert local_db.refresh() == ()
    assert (len(opened), len(read)) == (2, 1)
    assert local_db.plan_refresh().is_empty
    assert (len(opened), len(read)) == (4, 2)
    assert calls.count == columns * 4


def test_a_change_costs_what_is_made_from_it(local_db: Connection, calls: Calls) -> None:
    table = made(local_db, calls)
    local_db.refresh()
    table.add(pa.table({"id": [9]}))
    results = local_db.refresh()
    assert calls.count == 13
    assert [result.rows_computed for result in results] == [1, 1, 0, 1, 0]
    assert sorted(column(local_db.open_table("fewer"), "of_view")) == [-19, -7]


def test_the_plan_says_what_there_is_to_do_and_what_follows(
    local_db: Connection, calls: Calls
) -> None:
    table = made(local_db, calls)
    local_db.refresh()
    table.update(where="id = 3", values={"id": 30})
    plan = local_db.plan_refresh()
    assert [each.is_empty for each in plan.steps] == [False] * 5
    lines = str(plan).splitlines()
    assert lines[0].endswith("0 of 5 up to date")
    assert lines[1] == "  column 'doubled' of 'texts': compute 1 row"
    assert "what follows from column 'doubled' of 'texts'" in lines[2]
    assert "can't be planned" not in str(plan)
    assert "what follows" in plan._repr_html_()
    assert calls.count == 10
    local_db.refresh()
    assert "5 of 5 up to date" in str(local_db.plan_refresh())
    assert "everything is up to date" in local_db.plan_refresh()._repr_html_()


def test_the_first_plan_is_of_all_steps(local_db: Connection, calls: Calls) -> None:
    made(local_db, calls)
    plan = str(local_db.plan_refresh())
    assert "column 'doubled' of 'texts': compute 4 rows" in plan
    # The view of a view can't be planned yet, which is no trouble.
    assert "view 'fewer': what follows from view 'some', column 'of_view' of 'some'" in plan
    assert calls.count == 0


def test_columns_of_one_call_are_one_job(local_db: Connection, calls: Calls) -> None:
    class Both(NamedTuple):
        up: int
        down: int

    @udf
    def both(id: int) -> Columns[Both]:
        calls.note([id])
        return Both(id, -id)

    table = local_db.create_table("t", pa.table({"id": range(3)}))
    table.add_columns(both)
    (result,) = local_db.refresh()
    assert result.rows_computed == calls.count == 3
    assert local_db.refresh() == ()


@pytest.fixture
def broken(local_db: Connection, calls: Calls) -> Connection:
    """A database in which `doubled` fails: beside what is made from it there is other work."""
    table = made(local_db, calls)

    @udf(data_type=pa.int64())
    def failing(id: int) -> int:
        raise ValueError(f"no {id}")

    @udf
    def other(id: int) -> int:
        calls.note([f"other {id}"])
        return id

    table.alter_columns({"path": "doubled", "udf": failing})
    table.add_columns({"other": other})
    local_db.create_materialized_view("others", table.query().select(["other"]))
    return local_db


def test_what_fails_holds_back_what_is_made_from_it_alone(broken: Connection, calls: Calls) -> None:
    with pytest.raises(IncompleteRefreshError, match=r"ValueError: no [0-3]") as caught:
        broken.refresh()
    error = caught.value
    assert list(error.failed) == ["column 'doubled' of 'texts'"]
    assert isinstance(error.__cause__, geneva.errors.UDFExecutionError)
    assert error.left_out == (
        "column 'more' of 'texts'",
        "view 'some'",
        "column 'of_view' of 'some'",
        "view 'fewer'",
    )
    assert [result.rows_committed for result in error.results] == [4, 4]
    assert "2 jobs did what could be done" in str(error)
    assert calls.rows == [f"other {i}" for i in range(4)]
    assert column(broken.open_table("others"), "other") == [0, 1, 2, 3]


def test_after_a_fix_the_rest_is_done(broken: Connection, calls: Calls) -> None:
    with pytest.raises(IncompleteRefreshError):
        broken.refresh()

    @udf
    def mended(id: int) -> int:
        return 2 * id

    broken.open_table("texts").alter_columns({"path": "doubled", "udf": mended})
    broken.refresh()
    assert column(broken.open_table("fewer"), "of_view") == [-7]
    assert calls.rows.count("other 0") == 1


def test_a_cancelled_job_ends_all(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(local_db, calls)

    def cancelled(self: Table, column: str, **options: object) -> None:
        raise JobCancelledError("cancelled")

    monkeypatch.setattr(Table, "backfill", cancelled)
    with pytest.raises(JobCancelledError):
        local_db.refresh()
    assert local_db.list_jobs() == []


def test_a_table_that_cannot_be_opened_hides_no_other(
    local_db: Connection, calls: Calls, tmp_path: Path
) -> None:
    made(local_db, calls)
    local_db.create_table("bad", pa.table({"id": [1]}))
    for manifest in (tmp_path / "db" / "bad.lance" / "_versions").iterdir():
        manifest.write_bytes(b"no manifest")
    assert "table 'bad'" in str(local_db.plan_refresh())
    with pytest.raises(IncompleteRefreshError) as caught:
        local_db.refresh()
    assert list(caught.value.failed) == ["table 'bad'"]
    assert len(caught.value.results) == 5


def of_a_later_release(view: Table) -> None:
    """Let its query be in a format that only a later Geneva reads."""
    dataset = lance.dataset(view.ref.uri)
    stored = (dataset.schema.metadata or {})[b"geneva::view::query"].decode()
    later = stored.replace('"format": 1', '"format": 9')
    dataset.update_schema_metadata({"geneva::view::query": later})


def test_a_view_whose_query_cannot_be_read_hides_no_other(
    local_db: Connection, calls: Calls
) -> None:
    made(local_db, calls)
    of_a_later_release(local_db.open_table("some"))
    plan = local_db.plan_refresh()
    assert not plan.is_empty
    assert "table 'some': can't be read: The view's query is stored in format 9" in str(plan)
    assert "view 'fewer': can't be planned" not in str(plan)
    assert [each.step.table for each in plan.steps] == ["texts", "texts", "fewer"]
    with pytest.raises(IncompleteRefreshError) as caught:
        local_db.refresh()
    assert list(caught.value.failed) == ["table 'some'"]
    assert caught.value.left_out == ("view 'fewer'",)
    assert column(local_db.open_table("texts"), "more") == [1, 3, 5, 7]


class Panic(BaseException):
    """As Lance's of damaged data: it is no Exception."""


def test_a_panic_ends_its_own_step_alone(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(local_db, calls)
    table.add_columns({"other": tripled(calls)})
    estimated = Table._estimated

    def panicking(self: Table, plan: BackfillPlan) -> Any:
        if plan.column == "doubled":
            raise Panic("index out of bounds")
        return estimated(self, plan)

    monkeypatch.setattr(Table, "_estimated", panicking)
    assert "can't be planned: Panic: index out of bounds" in str(local_db.plan_refresh())
    with pytest.raises(IncompleteRefreshError, match="Panic: index") as caught:
        local_db.refresh()
    assert isinstance(caught.value.__cause__, Panic)
    assert column(table, "other") == [0, 3, 6, 9]


def test_an_interruption_ends_all(
    local_db: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(local_db, calls)

    def interrupted(self: Table, plan: BackfillPlan) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Table, "_estimated", interrupted)
    for call in (local_db.refresh, local_db.plan_refresh):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert calls.count == 0


def test_a_view_notes_what_is_written_to_its_source_and_the_plan_says_so(
    local_db: Connection, calls: Calls
) -> None:
    table = local_db.create_table("t", pa.table({"id": range(3), "x": range(3)}))
    table.add_columns({"of_x": tripled(calls, input_columns=["x"])})
    local_db.create_materialized_view("v", table.query().select(["id"])).refresh()
    plan = local_db.plan_refresh()
    assert "view 'v': note the source's version" in str(plan)
    assert [each.is_empty for each in plan.steps] == [False, False]
    assert len(local_db.refresh()) == 2
    assert [each.is_empty for each in local_db.plan_refresh().steps] == [True, True]


def test_a_column_that_cannot_be_read_in_places_holds_nothing_back(
    local_db: Connection, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    table = made(local_db, calls)
    table.add(pa.table({"id": [9]}))
    bad = lance.dataset(table.ref.uri).get_fragments()[0].data_files()[0].path
    path = Path(table.ref.uri) / "data" / bad
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(IncompleteRefreshError) as caught:
        local_db.refresh()
    assert "view 'some'" in caught.value.failed
    assert caught.value.left_out == ("column 'of_view' of 'some'", "view 'fewer'")
    assert sorted(calls.taken()) == ["doubled 9", "more 18"]
    # A log has the whole sentence; one that is part of another is short.
    assert "All other fragments are done and committed" in caplog.text
    path.write_bytes(kept)
    local_db.refresh()
    assert sorted(column(local_db.open_table("fewer"), "of_view")) == [-19, -7]
    assert "doubled 9" not in calls.rows


def test_a_message_names_the_first_of_many(local_db: Connection) -> None:
    @udf(data_type=pa.int64())
    def failing(id: int) -> int:
        raise ValueError(f"no {id}")

    table = local_db.create_table("t", pa.table({"id": [1]}))
    table.add_columns({f"c{i}": failing for i in range(12)})
    with pytest.raises(IncompleteRefreshError, match=r"^12 parts .*; and 2 others\. Nothing") as e:
        local_db.refresh()
    assert len(e.value.failed) == 12


def test_a_view_that_cannot_be_planned_says_why_while_its_source_has_work_to_do(
    local_db: Connection, calls: Calls
) -> None:
    table = made(local_db, calls)
    local_db.refresh()
    table.update(where="id = 3", values={"id": 30})
    view = local_db.create_materialized_view("ids", table.query().select(["id", "more"]))
    view.refresh()
    lance.dataset(table.ref.uri).drop_columns(["id"])
    steps = {str(each.step): each for each in local_db.plan_refresh().steps}
    ids, fewer = steps["view 'ids'"], steps["view 'fewer'"]
    assert ids.waits_for == ("column 'more' of 'texts'",)
    assert "can't be planned: The view reads column 'id', which table 'texts'" in ids.action
    assert ids.trouble in ids.action
    assert "what follows" in fewer.action


def test_views_that_are_made_from_each_other_hold_nothing_else_back(
    local_db: Connection, calls: Calls
) -> None:
    made(local_db, calls)
    local_db.drop_table("some")
    fewer = local_db.open_table("fewer")
    local_db.create_materialized_view("some", fewer.query().select(["of_view"]))
    query = local_db.open_table("some").query()
    local_db.create_materialized_view("of_some", query.select(["of_view"]))
    planned = {str(each.step): each for each in local_db.plan_refresh().steps}
    for name, other in (("some", "fewer"), ("fewer", "some")):
        action = planned[f"view {name!r}"].action
        assert action.startswith(f"can't be planned: View {name!r} can't be refreshed: it and")
        assert f"and {other!r} are made from each other" in action
    with pytest.raises(IncompleteRefreshError) as caught:
        local_db.refresh()
    assert sorted(caught.value.failed) == ["view 'fewer'", "view 'some'"]
    assert all(isinstance(each, UserInputError) for each in caught.value.failed.values())
    assert caught.value.left_out == ("view 'of_some'",)
    assert names(local_db) == ["texts.doubled", "texts.more"]
    assert calls.count == 8


def test_one_of_views_that_are_made_from_each_other_is_not_refreshed_by_itself_either(
    local_db: Connection,
) -> None:
    source = local_db.create_table("t", pa.table({"id": [1, 2]}))

    @geneva.chunker(output_schema=pa.schema([("x", pa.int64())]))
    def twice(id: int):  # type: ignore[no-untyped-def]
        return [{"x": id}, {"x": id}]

    @geneva.udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by="id")
    def counted(rows):  # type: ignore[no-untyped-def]
        return pa.table({"n": [rows.count_rows()]})

    local_db.create_materialized_view("a", source.query()).refresh()
    b = local_db.create_udtf_view("b", local_db.open_table("a").query().select(["id"]), twice)
    b.refresh()
    c = local_db.create_udtf_view("c", b.query(), counted)
    c.refresh()
    local_db.drop_table("a")
    local_db.create_materialized_view("a", c.query().select({"id": "n"}))
    jobs = len(local_db.list_jobs())
    words = r"View '{}' can't be refreshed: it and '{}', '{}' are made from each other\. Drop one"
    for name, first, second in ("acb", "bac", "cba"):
        view = local_db.open_materialized_view(name)
        for refresh in (
            view.refresh,
            view.refresh_async,
            view.plan_refresh,
            partial(view.refresh, 1),
            partial(local_db.refresh, name),
            partial(local_db.plan_refresh, name),
        ):
            with pytest.raises(UserInputError, match=words.format(name, first, second)):
                refresh()
    assert len(local_db.list_jobs()) == jobs
    # What is made from one of them, and is none of them, can be as that one is.
    local_db.create_materialized_view("of_b", b.query()).refresh()


def test_views_of_two_databases_are_in_no_circle_because_of_their_names(
    local_db: Connection, tmp_path: Path
) -> None:
    other = geneva.connect(tmp_path / "other", runner=InProcessRunner)
    inner = other.create_table("view", pa.table({"id": [1]}))
    between = other.create_materialized_view("between", inner.query())
    between.refresh()
    view = local_db.create_materialized_view("view", between.query())
    view.refresh()
    assert column(view, "id") == [1]


def test_branches_are_left_alone(local_db: Connection, calls: Calls) -> None:
    table = made(local_db, calls)
    table.branches.create("b")
    local_db.refresh()
    assert column(local_db.open_table("texts@b"), "doubled") == [None] * 4


def test_chunked_views_and_lancedbs_own_are_in_their_place(
    local_db: Connection, calls: Calls
) -> None:
    table = made(local_db, calls)

    @geneva.chunker(output_schema=pa.schema([("digit", pa.string())]))
    def digits(more: int):  # type: ignore[no-untyped-def]
        calls.note([f"digits {more}"])
        return [{"digit": digit} for digit in str(more)]

    local_db.create_udtf_view("digits", table.query().select(["id"]), digits)
    local_db.create_materialized_view("theirs", "texts", select=["id"])
    table.add(pa.table({"id": [30]}))
    local_db.refresh()
    assert column(local_db.open_table("digits"), "digit") == ["1", "3", "5", "7", "6", "1"]
    assert local_db.refresh() == ()
    assert calls.count == 2 * 5 + 3 + 5


def test_options_are_for_each_job(local_db: Connection, calls: Calls) -> None:
    made(local_db, calls)
    with pytest.raises(UnknownOptionError, match="whole database has no option 'job_id'"):
        local_db.refresh(job_id="x")  # type: ignore[call-overload]
    with pytest.raises(UserInputError, match="concurrency must be"):
        local_db.refresh(concurrency=0)
    assert calls.count == 0
    local_db.refresh(concurrency=1, checkpoint_size=2)
    assert {job.config["concurrency"] for job in local_db.list_jobs()} == {1}
    assert calls.count == 10


def test_by_name_it_is_one_view(local_db: Connection, calls: Calls) -> None:
    table = made(local_db, calls)
    table.backfill("more")
    assert local_db.refresh("some").rows_committed == 2
    with pytest.raises(TableNotFoundError):
        local_db.refresh("sme")


def test_a_plan_by_name_is_that_of_one_view(local_db: Connection, calls: Calls) -> None:
    made(local_db, calls).backfill("more")
    assert local_db.plan_refresh("some") == local_db["some"].plan_refresh()  # type: ignore[attr-defined]
    with pytest.raises(UserInputError, match="'texts' is no view"):
        local_db.plan_refresh("texts")
    with pytest.raises(UnknownOptionError, match="has no option 'concurrency'"):
        local_db.plan_refresh(concurrency=2)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", [5, True, b"some", ["some"], 0])
def test_what_is_no_name_is_said(name: Any, local_db: Connection, calls: Calls) -> None:
    made(local_db, calls)
    for call in (local_db.refresh, local_db.plan_refresh, local_db.open_table):
        with pytest.raises(TypeMismatchError, match="name of a table or view is a text") as error:
            call(name)
        assert repr(name) in str(error.value)

    async def refreshed() -> None:
        with await geneva.connect_async(local_db.uri, runner=InProcessRunner) as db:
            await db.refresh(name)

    with pytest.raises(TypeMismatchError):
        asyncio.run(refreshed())
    assert calls.count == 0
    assert local_db.list_jobs() == []


def test_an_asynchronous_connection_has_it(tmp_path: Path, calls: Calls) -> None:
    made(connect(tmp_path / "db", InProcessRunner), calls)

    async def refreshed() -> int:
        with await geneva.connect_async(tmp_path / "db", runner=InProcessRunner) as db:
            return len(await db.refresh())

    assert asyncio.run(refreshed()) == 5


def test_on_spark(db: Connection, calls: Calls) -> None:
    made(db, calls)
    assert len(db.refresh()) == 5
    assert column(db.open_table("fewer"), "of_view") == [-7]
    assert calls.count == 10


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path: Path, calls: Calls) -> Path:
        made(connect(tmp_path / "db", InProcessRunner), calls)
        return tmp_path / "db"

    def test_a_dry_run_runs_nothing(self, folder: Path, calls: Calls) -> None:
        done = CliRunner().invoke(app, ["refresh", str(folder), "--dry-run"])
        assert done.exit_code == 0
        assert "column 'doubled' of 'texts': compute 4 rows" in done.stdout
        assert calls.count == 0

    def test_each_job_is_a_line(
        self, broken: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli_refresh, "connect", lambda *_: broken)
        done = CliRunner().invoke(app, ["refresh", broken.uri])
        assert done.exit_code == 1
        column_line, view_line = done.stdout.splitlines()
        assert column_line.startswith(
            "column 'other' of 'texts': DONE: 4 rows computed, 4 committed"
        )
        assert view_line.startswith("view 'others': DONE: 0 rows computed, 4 committed")
        assert "error: 1 part of the database" in done.stderr

    def test_a_failure_is_beside_what_was_done(
        self, broken: Connection, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli_refresh, "connect", lambda *_: broken)
        done = CliRunner().invoke(app, ["refresh", broken.uri, "--json"])
        assert done.exit_code == 1
        answer = json.loads(done.stdout)
        assert answer["error"]["type"] == "IncompleteRefreshError"
        assert [(job["table"], job["columns"]) for job in answer["jobs"]] == [
            ("texts", ["other"]),
            ("others", None),
        ]
        assert {job["status"] for job in answer["jobs"]} == {"DONE"}
        (why,) = answer["failed"].values()
        assert "ValueError: no" in why
        assert "view 'some'" in answer["left_out"]
        note, hint = answer["error"]["notes"]
        assert note.startswith("column 'doubled' of 'texts':")
        assert 'raise ValueError(f"no {id}")' in note
        assert "on_error=skip_on_error()" in hint

    def test_a_plan_is_without_secrets(self, folder: Path) -> None:
        of_a_later_release(connect(folder, InProcessRunner).open_table("some"))
        hidden = ["--storage-option", "aws_secret_access_key=stored in format"]
        for more in ([], ["--json"]):
            done = CliRunner().invoke(app, ["refresh", str(folder), "--dry-run", *hidden, *more])
            assert done.exit_code == 0
            assert "The view's query is" in done.stdout
            assert "stored in format" not in done.stdout

    def test_nothing_to_do(self, tmp_path: Path) -> None:
        connect(tmp_path / "db", InProcessRunner).create_table("t", pa.table({"id": [1]}))
        done = CliRunner().invoke(app, ["refresh", str(tmp_path / "db")])
        assert (done.exit_code, done.stdout) == (0, "Everything is up to date.\n")
