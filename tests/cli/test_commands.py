"""Every command, as a shell sees it: tables for people, JSON for programs, exit codes."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import typer
from typer.testing import Result

import geneva
from command_line import invoke
from geneva.cli import app
from geneva.cli.terminal import LogSentences
from geneva.config import Settings
from geneva.errors import JavaNotFoundError, JobError
from geneva.execution.runner import InProcessRunner
from geneva.options import (
    BackfillArguments,
    RefreshArguments,
    SelectionArguments,
    option_infos,
)
from geneva.storage.jobs.events import JobEvent

STABLE = {"new_table_enable_stable_row_ids": "true"}
FUNCTIONS = """
from typing import NamedTuple

import geneva
import pyarrow as pa
from geneva.udf.policy import skip_on_error

@geneva.udf
def words(text: str) -> int:
    return len(text.split())

def letters(text: str) -> int:
    return len(text)

class Counts(NamedTuple):
    long: int
    short: int

@geneva.udf
def counts(text: str) -> geneva.Columns[Counts]:
    return Counts(len(text), len(text.split()))

@geneva.udf
def fails(id: int) -> int:
    raise ValueError("never works")

@geneva.udf(on_error=skip_on_error())
def halves(id: int) -> int:
    if id % 2:
        raise ValueError(f"{id} is odd")
    return id // 2

@geneva.chunker(output_schema=pa.schema([("word", pa.string())]))
def each_word(text: str):
    for word in text.split():
        yield {"word": word}

LANGUAGES = pa.schema([("lang", pa.string()), ("n", pa.int64())])

@geneva.udtf(output_schema=LANGUAGES, partition_by="lang")
def by_language(source):
    yield {"lang": source.to_arrow()["lang"][0].as_py(), "n": source.count_rows()}

@geneva.udf
def tells(id: int) -> int:
    print("told of", id)
    return id

number = 3
"""

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a database, a module of functions, and no Spark."""
    quiet = Settings(jvm_archive=False, progress=False)
    in_process = functools.partial(geneva.connect, runner=InProcessRunner, settings=quiet)
    monkeypatch.setattr(geneva, "connect", in_process)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    (tmp_path / "own_broken.py").write_text("1 / 0\n")
    (tmp_path / "own_needy.py").write_text("import not_installed_anywhere\n")
    rows = [{"id": i, "lang": "en" if i % 2 else "de", "text": "word " * i} for i in range(6)]
    geneva.connect("db").create_table("articles", rows, storage_options=STABLE)
    yield tmp_path
    for name in ("own_functions", "own_broken", "own_needy"):
        sys.modules.pop(name, None)


def run(*arguments: str, code: int = 0, tracebacks: int = 0) -> Result:
    """Run a command; it has to leave with `code`, and with no traceback but a user's own."""
    result = invoke(list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    assert result.stderr.count("Traceback") == tracebacks
    return result


def read(*arguments: str, code: int = 0) -> Any:
    """Run a command with --json: its whole standard output is one document."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def refused(*arguments: str, code: int = 2, tracebacks: int = 0) -> str:
    """Run a command that is wrong: nothing on standard output, a message on standard error."""
    result = run(*arguments, code=code, tracebacks=tracebacks)
    assert result.stdout == ""
    return result.stderr


def fill(column: str = "words") -> Any:
    return read("backfill", "db", "articles", column, "--udf", f"own_functions:{column}", "--save")


# ---------------------------------------------------------------------------------------- look


@pytest.mark.slow
def test_branches_and_namespaces_by_name(folder: Path) -> None:
    db = geneva.connect("db")
    db["articles"].branches.create("rel/v1")
    db.create_namespace(["ns"])
    db.create_table("articles", [{"id": 5, "text": "a b"}], namespace_path=["ns"])
    for name, computed in (("articles@rel/v1", 6), ("ns$articles", 1)):
        ran = read("backfill", "db", name, "words", "--udf", "own_functions:words", "--save")
        assert ran["rows_computed"] == computed
        assert read("plan", "db", name, "words")["rows_to_compute"] == 0
        assert read("verify", "db", name, "words")["counts"] == {"right": computed}
        assert read("describe", "db", name)["name"] == name
        assert read("errors", "db", name)["total"] == 0
        assert [j["table"] for j in read("jobs", "list", "db", "--table", name)["jobs"]] == [name]
    names = [table["name"] for table in read("tables", "db")["tables"]]
    assert names == ["articles", "articles@rel/v1", "ns$articles"]
    assert "words" not in run("sample", "db", "articles").stdout
    assert "words" in run("sample", "db", "articles@rel/v1").stdout
    assert "no branch 'rel' of table articles" in refused("describe", "db", "articles@rel")


def test_tables(folder: Path) -> None:
    fill()
    shown = run("tables", "db").stdout
    assert shown.splitlines()[0].split() == [
        *("name", "kind", "rows", "version", "fragments", "computed", "columns")
    ]
    assert shown.splitlines()[2].split() == ["articles", "table", "6", "3", "1", "words"]
    assert read("tables", "db") == {
        "tables": [
            {
                "name": "articles",
                "kind": "table",
                "is_view": False,
                "rows": 6,
                "version": 3,
                "fragments": 1,
                "stable_row_ids": True,
                "computed_columns": ["words"],
                "error": None,
            }
        ]
    }


def test_an_empty_database(folder: Path) -> None:
    Path("empty").mkdir()
    assert "no tables" in run("tables", "empty").stdout
    assert read("tables", "empty") == {"tables": []}
    assert "no views" in run("view", "list", "empty").stdout
    assert "no such jobs" in run("jobs", "list", "empty").stdout


def test_a_database_that_is_not_there_is_not_made(folder: Path) -> None:
    assert "no database 'nowhere'" in refused("tables", "nowhere")
    assert not Path("nowhere").exists()


@pytest.mark.slow
def test_describe_tells_what_is_stale_and_why(folder: Path) -> None:
    fill()
    assert "up to date" in run("describe", "db", "articles").stdout
    geneva.connect("db").open_table("articles").add([{"id": 9, "lang": "en", "text": "x"}])
    told = read("describe", "db", "articles")
    assert told["columns"][3] == {
        "name": "words",
        "type": "int64",
        "nullable": True,
        "computed": True,
    }
    (column,) = told["computed_columns"]
    assert (column["udf"], column["inputs"]) == ("words", ["text"])
    assert (column["stale_rows"], column["reasons"]) == (1, {"new": 1})
    assert told["view"] is None
    assert "new: 1" in run("describe", "db", "articles").stdout


def test_columns_that_one_call_fills(folder: Path) -> None:
    save = ("--udf", "own_functions:counts", "--save")
    done = read("backfill", "db", "articles", "short", *save)
    assert (done["status"], done["rows_computed"]) == ("DONE", 6)
    told = read("describe", "db", "articles")["computed_columns"]
    assert [(c["name"], c["filled_with"]) for c in told] == [
        ("long", ["short"]),
        ("short", ["long"]),
    ]
    assert "counts(text) with short" in run("describe", "db", "articles").stdout
    assert read("plan", "db", "articles", "long")["columns"] == ["long", "short"]
    assert read("jobs", "list", "db")["jobs"][0]["column"] == "long, short"
    assert "long, short" in run("trust", "show", "db", "articles", "short").stdout


def test_describe_runs_no_user_code(folder: Path) -> None:
    fill()
    Path("own_functions.py").write_text("raise SystemExit('ran')")
    sys.modules.pop("own_functions")
    run("describe", "db", "articles")
    run("plan", "db", "articles", "words")


def test_sample(folder: Path) -> None:
    told = read("sample", "db", "articles", "--where", "id > 3", "--columns", "id,lang", "-n", "1")
    assert told == {
        "table": "articles",
        "columns": ["id", "lang"],
        "rows": [{"id": 4, "lang": "de"}],
    }
    assert len(read("sample", "db", "articles")["rows"]) == 6
    assert "no such rows" in run("sample", "db", "articles", "--where", "id > 99").stdout


def test_values_of_every_kind_can_be_sampled(folder: Path) -> None:
    data = pa.table(
        {
            "image": pa.array([b"\x00\xff" * 700, None]),
            "vector": pa.array([[0.5] * 8, [0.25] * 8], pa.list_(pa.float32(), 8)),
            "number": pa.array([float("nan"), 2.0]),
            "text": ["[bold]not markup[/bold]", "long " * 99],
            "person": [{"name": "a"}, None],
        }
    )
    geneva.connect("db").create_table("kinds", data)
    marked = pa.field("data", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = pa.table([pa.array([b"abc", None, b""], marked.type)], schema=pa.schema([marked]))
    geneva.connect("db").create_table("blobs", blobs)
    own = pa.table({"data": lance.blob_array([b"abc", None, b""])})
    own = own.cast(pa.schema([lance.blob_field("data")]))
    geneva.connect("db").create_table("own_blobs", own)
    for name in ("blobs", "own_blobs"):
        for condition in ((), ("--where", "true")):
            assert "<3 bytes>" in run("sample", "db", name, *condition).stdout
            sampled = read("sample", "db", name, *condition)["rows"]
            assert [row["data"] for row in sampled] == ["YWJj", None, ""]
    shown = run("sample", "db", "kinds").stdout
    for text in ("<1,400 bytes>", "[0.5, 0.5, 0.5, 0.5, ... 8 in all]", "[bold]not", "{name: a}"):
        assert text in shown
    rows = read("sample", "db", "kinds")["rows"]
    assert rows[0]["image"].startswith("AP8A/w")
    assert rows[0]["number"] is None
    assert rows[1]["vector"] == [0.25] * 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("describe", "db", "artcles"), "There is no table 'artcles'"),
        (("sample", "db", "articles", "--columns", "txt"), "Did you mean 'text'?"),
        (("sample", "db", "articles", "--where", "nope = 1"), "'nope'"),
        (("sample", "db", "articles", "--where", "id >"), "id >"),
        (("sample", "db", "articles", "-n", "0"), "greater than or equal"),
        (("plan", "db", "articles", "wrds"), "no column 'wrds'"),
        (("plan", "db", "articles", "lang"), "has no UDF"),
        (("backfill", "db", "articles", "lang", "--save"), "--udf"),
        (("backfill", "db", "articles", "lang", "--inputs", "id"), "--udf"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions"), "module:function"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions:no"), "has no 'no'"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions:wrds"), "mean 'words'?"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions.py:words"), "without .py"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions:number"), "not a function"),
        (("backfill", "db", "articles", "x", "--udf", "own_functions:each_word"), "chunker"),
        (("backfill", "db", "articles", "x", "--udf", "own_missing:f"), "no module 'own_missing'"),
        (("backfill", "db", "articles", "x", "--udf", "own_needy:f"), "not_installed_anywhere"),
        (("backfill", "db", "articles", "x", "--udf", "own_broken:f"), "line 1"),
        (("view", "refresh", "db", "articles"), "is a table, not a view"),
        (("view", "create", "db", "v", "--source", "articles", "--add", "words"), "NAME=WHAT"),
        (("jobs", "show", "db", "zzz"), "There is no job 'zzz'"),
        (("jobs", "list", "db", "--status", "asleep"), "PENDING"),
        (("jobs", "watch", "db"), "No job is running"),
        (("errors", "db", "nope"), "There is no table 'nope'"),
    ],
)
def test_mistakes_get_a_sentence(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


# ------------------------------------------------------------------------------------- compute


def test_plan_then_backfill(folder: Path) -> None:
    first = fill()
    assert (first["status"], first["rows_computed"], first["rows_committed"]) == ("DONE", 6, 6)
    assert first["metrics"]["udf_rows"] == 6
    assert read("plan", "db", "articles", "words")["nothing_to_do"] is True
    planned = read("plan", "db", "articles", "words", "--where", "id > 3")
    assert (planned["rows_to_run"], planned["reasons"]) == (2, {"asked for": 2})
    assert [f["rows_to_run"] for f in planned["fragments"]] == [2]
    assert (
        "compute    2 of 6 rows"
        in run(*("plan", "db", "articles", "words", "--where", "id > 3")).stdout
    )
    shown = run("backfill", "db", "articles", "words", "--where", "id > 3").stdout
    assert shown.startswith("DONE: 2 rows computed, 2 committed")
    values = geneva.connect("db").open_table("articles").to_arrow()["words"].to_pylist()
    assert values == list(range(6))


def test_a_mistake_in_the_clause_saves_nothing(folder: Path) -> None:
    save = ("backfill", "db", "articles", "words", "--udf", "own_functions:words", "--save")
    assert "'foo'" in refused(*save, "--where", "foo = 1")
    assert "words" not in geneva.connect("db").open_table("articles").schema.names
    assert run(*save, "--where", "words IS NULL").stdout.startswith("DONE: 6 rows computed")
    number = ("backfill", "db", "articles", "words", "--udf", "own_functions:letters", "--save")
    refused(*number, "--where", "id >")
    (column,) = read("describe", "db", "articles")["computed_columns"]
    assert column["stale_rows"] == 0, "the column has the function that it had"


def test_what_functions_print_here_is_no_output(folder: Path) -> None:
    fill("tells")
    for command in (("verify", "db", "articles", "tells", "--run"), ("preview", "db", "articles")):
        asked = command if command[0] == "verify" else (*command, "tells")
        result = run(*asked)
        assert "told of" not in result.stdout
        assert "told of 0" in result.stderr


def test_every_option_of_a_backfill_arrives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    seen: dict[str, Any] = {}

    def backfill(self: Any, column: str, **options: Any) -> Any:
        seen.update(options)
        raise JobError("seen")

    monkeypatch.setattr(geneva.Table, "backfill", backfill)
    numbers = {
        "concurrency": 2,
        "intra_applier_concurrency": 3,
        "checkpoint_size": 4,
        "min_checkpoint_size": 5,
        "max_checkpoint_size": 6,
        "task_size": 7,
        "commit_granularity": 8,
        "num_frags": 9,
        "read_version": 10,
        "timeout": 11.0,
    }
    given = [
        text for name, n in numbers.items() for text in (f"--{name.replace('_', '-')}", str(n))
    ]
    refused(
        "backfill",
        "db",
        "articles",
        "words",
        "--where",
        "id = 1",
        "--retry-failed",
        "--unproven",
        "keep",
        "--upstream",
        "ignore",
        *given,
        code=1,
    )
    words = {"where": "id = 1", "udf": None, "unproven": "keep", "upstream": "ignore"}
    assert seen == {**numbers, **words, "retry_failed": True}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (("plan",), SelectionArguments),
        (("backfill",), BackfillArguments),
        (("view", "refresh"), RefreshArguments),
    ],
)
def test_every_option_of_the_record_is_an_option_of_the_command(
    command: tuple[str, ...], arguments: Any
) -> None:
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    known = option_infos(arguments)
    shown = {each.name: each for each in group.params}
    for name, (info, default) in known.items():
        assert shown[name].opts == [f"--{name.replace('_', '-')}"]
        assert shown[name].help == info.help
        assert shown[name].default == default
    others = set(option_infos(BackfillArguments)) - set(known)
    assert not others & set(shown)


def test_a_plain_function_is_enough_and_inputs_can_be_named(folder: Path) -> None:
    arguments = ("backfill", "db", "articles", "n", "--udf", "own_functions:letters")
    assert "no column 'n'" in refused(*arguments)
    run(*arguments, "--inputs", "lang", "--save")
    assert read("sample", "db", "articles", "--columns", "n", "-n", "1")["rows"] == [{"n": 2}]
    assert read(*arguments, "--save")["rows_computed"] == 6, "the column has another function"
    assert read("sample", "db", "articles", "--columns", "n", "-n", "1")["rows"] == [{"n": 0}]


def test_a_failing_function_is_exit_code_one(folder: Path) -> None:
    failing = ("backfill", "db", "articles", "bad", "--udf", "own_functions:fails", "--save")
    message = refused(*failing, code=1, tracebacks=1)
    assert "never works" in message
    assert 'own_functions.py", line' in message
    assert str(Path(geneva.__file__).parent) not in message
    (job,) = read("jobs", "list", "db", "--status", "failed")["jobs"]
    assert "never works" in job["error"]
    assert read("jobs", "watch", "db", job["job_id"], code=1)["status"] == "FAILED"


# --------------------------------------------------------------------------------------- views


def test_the_life_of_a_view(folder: Path) -> None:
    made = read(
        *("view", "create", "db", "english", "--source", "articles", "--where", "lang = 'en'"),
        *("--select", "id,text", "--add", "words=own_functions:words"),
        *("--add", "loud=upper(lang)", "--shuffle", "7", "--limit", "2", "--offset", "0"),
    )
    assert (made["name"], made["source"], made["up_to_date"]) == ("english", "articles", False)
    assert read("view", "plan", "db", "english")["nothing_to_do"] is False
    told = read("describe", "db", "english")
    assert told["view"]["shuffle_seed"] == 7
    assert told["computed_columns"][0]["reasons"] == {"not refreshed yet": 2}
    assert read("view", "refresh", "db", "english")["rows_computed"] == 2
    assert read("view", "list", "db")["views"][0]["up_to_date"] is True
    assert "up to date" in run("view", "list", "db").stdout
    shown = run("describe", "db", "english").stdout
    assert "words(text)" in shown
    assert "lang = 'en'" in shown
    row = read("sample", "db", "english", "-n", "1")["rows"][0]
    assert list(row) == ["id", "text", "words", "loud"]
    assert row["words"] == row["id"]
    assert read("tables", "db")["tables"][1]["is_view"] is True
    assert "is dropped" in run("view", "drop", "db", "english", "--yes").stdout
    assert read("view", "list", "db") == {"views": []}


def test_a_view_of_a_chunker(folder: Path) -> None:
    run(
        *("view", "create", "db", "each", "--source", "articles", "--select", "id"),
        *("--add", "word=own_functions:each_word"),
    )
    run("view", "refresh", "db", "each")
    assert len(read("sample", "db", "each", "-n", "99")["rows"]) == 15


def test_a_view_of_a_table_function(folder: Path) -> None:
    run(
        *("view", "create", "db", "langs", "--source", "articles", "--where", "id > 1"),
        *("--udtf", "own_functions:by_language"),
    )
    planned = read("view", "plan", "db", "langs")
    rows = geneva.connect("db").open_table("articles").to_arrow().to_pylist()
    expected = Counter(row["lang"] for row in rows if row["id"] > 1)
    counts = {"total": len(expected), "to_compute": len(expected), "leaving": 0}
    assert planned["partitions"] == counts
    assert read("describe", "db", "langs")["view"]["partitions"] == counts
    assert (
        f"partitions run the table function on {len(expected)}"
        in run("view", "plan", "db", "langs").stdout
    )
    assert read("view", "refresh", "db", "langs")["rows_computed"] == len(expected)
    found = read("sample", "db", "langs", "-n", "99")["rows"]
    assert {row["lang"]: row["n"] for row in found} == expected
    assert [v["kind"] for v in read("view", "list", "db")["views"]] == ["udtf"]
    assert [t["kind"] for t in read("tables", "db")["tables"]] == ["table", "udtf"]
    assert "by_language" in run("describe", "db", "langs").stdout
    assert "udtf" in run("view", "list", "db").stdout
    assert "create_udtf_view" in refused(
        *("view", "create", "db", "v", "--source", "articles"),
        *("--add", "x=own_functions:by_language"),
    )
    run("view", "drop", "db", "langs", "--yes")


def test_a_view_without_stable_ids_is_made_with_a_warning(folder: Path) -> None:
    without = {"new_table_enable_stable_row_ids": "false"}
    geneva.connect("db").create_table("plain", [{"id": 1}], storage_options=without)
    result = run("view", "create", "db", "v", "--source", "plain")
    assert result.stderr.startswith("warning: Source table 'plain' has no stable row IDs")
    assert "stable row IDs" in refused("view", "create", "db", "w", "--source", "plain", "--strict")


def test_a_view_of_lancedbs_own_is_listed_and_dropped(folder: Path) -> None:
    geneva.connect("db").create_materialized_view("theirs", "articles", where="id > 3")
    rows = geneva.connect("db").open_table("theirs").count_rows()
    (listed,) = read("view", "list", "db")["views"]
    known = {key: value for key, value in listed.items() if value is not None}
    assert known == {"name": "theirs", "kind": "lancedb", "rows": rows}
    assert "LanceDB's own" in run("view", "list", "db").stdout
    run("view", "drop", "db", "theirs", "--yes")
    assert read("view", "list", "db") == {"views": []}


def test_dropping_asks_first(folder: Path) -> None:
    run("view", "create", "db", "v", "--source", "articles")
    answered = invoke(["view", "drop", "db", "v"], input="n\n")
    assert answered.exit_code == 1
    assert len(read("view", "list", "db")["views"]) == 1
    assert invoke(["view", "drop", "db", "v"], input="y\n").exit_code == 0


# ---------------------------------------------------------------------------------------- jobs


def test_jobs_are_listed_shown_and_watched(folder: Path) -> None:
    job_id = fill()["job_id"]
    run("backfill", "db", "articles", "words")
    listed = read("jobs", "list", "db")["jobs"]
    assert [job["metrics"]["udf_rows"] for job in listed] == [0, 6]
    assert read("jobs", "list", "db", "-n", "1")["jobs"] == listed[:1]
    assert "1 older" in run("jobs", "list", "db", "-n", "1").stdout
    assert read("jobs", "list", "db", "--table", "articles", "--status", "failed") == {"jobs": []}
    assert job_id[:8] in run("jobs", "list", "db").stdout
    told = read("jobs", "show", "db", job_id[:8])
    assert told["job_id"] == job_id
    assert told["events"][0]["kind"] == "created"
    assert "udf_rows" in run("jobs", "show", "db", job_id).stdout
    assert run("jobs", "watch", "db", job_id).stdout.startswith("DONE: 6 rows committed")
    assert "has ended already" in refused("jobs", "cancel", "db", job_id)


def test_a_start_of_an_id_that_many_have_is_refused(folder: Path) -> None:
    for _ in range(17):  # two ids begin with the same of sixteen characters
        geneva.connect("db").open_table("articles")
        fill()
    starts = [job["job_id"][0] for job in read("jobs", "list", "db", "-n", "99")["jobs"]]
    twice = next(start for start in starts if starts.count(start) > 1)
    assert "give more of the id" in refused("jobs", "show", "db", twice)


def test_errors_of_rows(folder: Path) -> None:
    assert "No errors" in run("errors", "db", "articles").stdout
    first = fill("halves")
    assert first["rows_failed"] == 3
    job_id = first["job_id"]
    told = read("errors", "db", "articles", "--column", "halves", "--job", job_id[:8])
    assert told["total"] == 3
    assert {error["message"] for error in told["errors"]} == {f"{i} is odd" for i in (1, 3, 5)}
    assert "is odd" in told["errors"][0]["traceback"]
    shown = run("errors", "db", "articles", "-n", "2").stdout
    assert "ValueError" in shown
    assert "1 older" in shown
    assert read("describe", "db", "articles")["computed_columns"][0]["failed_rows"] == 3
    assert "failed and skipped: 3" in run("describe", "db", "articles").stdout
    again = read("plan", "db", "articles", "halves", "--retry-failed")
    assert again["rows_to_run"] == 3


def test_the_console_is_served_from_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("geneva.console")
    seen: list[Any] = []
    monkeypatch.setattr(console, "serve", lambda *args, **options: seen.append((args, options)))
    run("console", "db", "--port", "0", "--storage-option", "key=value1")
    ((uri,), options) = seen.pop()
    assert uri == str(folder / "db")
    assert options == {
        "host": "127.0.0.1",
        "port": 0,
        "token": None,
        "storage_options": {"key": "value1"},
    }
    assert "no such folder" in refused("console", "nowhere")


# --------------------------------------------------------------------------------- this machine


def test_the_doctor_without_spark(folder: Path) -> None:
    told = read("doctor", "db", "--no-spark")
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert told["ok"] is True
    assert states["storage"] == "ok"
    assert states["test job"] == "skipped"
    assert list(Path("db/_geneva/signals").glob("*doctor*")) == [], "it leaves nothing behind"


def test_the_doctor_runs_a_job(folder: Path) -> None:
    checks = {check["name"]: check for check in read("doctor")["checks"]}
    assert "a second job in" in checks["test job"]["detail"]


def test_what_the_doctor_misses_is_exit_code_three(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_java() -> None:
        raise JavaNotFoundError("no Java\nInstall one")

    monkeypatch.setattr("geneva.spark.embedded.java.find_java", no_java)
    shown = run("doctor", code=3).stdout
    assert "FAIL  java" in shown
    assert "Install one" in shown


def test_a_store_that_cant_be_written_is_exit_code_one(folder: Path) -> None:
    told = read("doctor", "nowhere", "--no-spark", code=1)
    assert [c["name"] for c in told["checks"] if c["state"] == "failed"] == ["storage"]


# ------------------------------------------------------------------------------------- secrets


def test_storage_options_arrive_and_are_never_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def connect(uri: str, storage_options: Any) -> Any:
        seen.append(dict(storage_options))
        raise OSError(f"403 from the store for key {storage_options['secret']}")

    monkeypatch.setattr(geneva, "connect", connect)
    message = refused(
        *("tables", "s3://b/p", "--storage-option", "secret=hunter22"),
        *("--storage-option", "region=x=y"),
        code=1,
    )
    assert seen == [{"secret": "hunter22", "region": "x=y"}]
    assert "hunter22" not in message
    assert "for key ***" in message
    wrong = refused("tables", "s3://b/p", "--storage-option", "hunter22")
    assert "hunter22" not in wrong
    monkeypatch.setenv("GENEVA_STORAGE_OPTIONS", "secret=hunter22 region=z")
    refused("tables", "s3://b/p", code=1)
    assert seen[-1] == {"secret": "hunter22", "region": "z"}
    assert "hunter22" not in run("tables", "--help").output


def test_logs_are_sentences_and_py4js_own_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogSentences(logging.WARNING)
    for path in ("/site-packages/py4j/java_gateway.py", "/geneva/jobs.py"):
        handler.emit(logging.LogRecord("root", logging.ERROR, path, 1, f"from {path}", (), None))
    assert capsys.readouterr().err == "warning: from /geneva/jobs.py\n"


# -------------------------------------------------------------------------------------- verify


def test_verify(folder: Path) -> None:
    fill()
    rows = read("describe", "db", "articles")["rows"]
    shown = run("verify", "db", "articles", "words", "--run").stdout
    assert f"{rows} of {rows} rows looked at" in shown
    report = read("verify", "db", "articles", "words", "--sample", "2")
    assert (report["ok"], report["rows"], report["counts"]) == (True, 2, {"right": 2})
    for sample, looked_at in (("1", 1), ("1.0", rows), ("0.5", rows // 2), ("1000", rows)):
        report = read("verify", "db", "articles", "words", "--sample", sample)
        assert report["rows"] == looked_at
    assert "'some' is no number" in refused("verify", "db", "articles", "words", "--sample", "some")
    assert "sample must be" in refused("verify", "db", "articles", "words", "--sample", "nan")
    geneva.connect("db").open_table("articles").update(where="id = 1", values={"text": "other"})
    report = read("verify", "db", "articles", "words")
    assert report["counts"]["stale"] == 1
    assert [found["state"] for found in report["examples"]] == ["stale"]
    assert "no column 'wrds'" in refused("verify", "db", "articles", "wrds")


def test_cleanup_removes_what_a_dead_job_left(folder: Path) -> None:
    assert "nothing to remove" in run("cleanup", "db").stdout
    connection = geneva.connect("db")
    payload = {"table": "gone", "column": "x", "type": "BACKFILL", "driver": {}}
    ended = JobEvent("old", "status", {"status": "FAILED"})
    connection._history.append([JobEvent("old", "created", payload), ended])
    connection._signals.beat("old", {})
    told = read("cleanup", "db")
    assert told["signals"] == 1
    assert set(told["tables"]) == {"articles"}
    assert not list((folder / "db" / "_geneva" / "signals").iterdir())


def test_cleanup_goes_on_behind_a_table_that_can_not_be_opened(folder: Path) -> None:
    (folder / "db" / "a.lance").mkdir()
    done = run("cleanup", "db", code=1)
    assert "a: Table 'a'" in done.stderr
    assert "can't be opened" in done.stderr
    assert "nothing to remove" in done.stdout
    told = read("cleanup", "db", code=1)["tables"]
    assert told["articles"]["files"] == 0
    assert "can't be opened" in told["a"]["error"]
    assert "can't be opened" in refused("cleanup", "db", "a")
