"""What strangers wrote into a database, or on a command line, in a terminal: it acts on nothing."""

from __future__ import annotations

import functools
import json
import logging
import re

import pyarrow as pa
import pytest
from rich.console import Console
from typer.testing import Result

import geneva
from command_line import invoke
from geneva import skip_on_error, udf
from geneva.cli.terminal import LogSentences, grid
from geneva.config import Settings
from geneva.execution.jobs.progress import JobProgress, ProgressBars
from geneva.execution.runner import InProcessRunner

EVIL = "x\x1b]0;owned\x07\x9b31m\u202eevil\r\nerror: fake [bold]"
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]")
STABLE = {"new_table_enable_stable_row_ids": "true"}


@udf(on_error=skip_on_error(), name=EVIL)
def fails(text: str) -> str:
    raise ValueError(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database whose column, function, values, clauses and errors are all hostile."""
    path = tmp_path_factory.mktemp("hostile") / "db"
    quiet = Settings(jvm_archive=False, progress=False)
    db = geneva.connect(path, runner=InProcessRunner, settings=quiet)
    rows = pa.table({"id": [1, 2], EVIL: [EVIL, "y"]})
    table = db.create_table("t", rows, storage_options=STABLE)
    table.add_columns({f"c{EVIL}": (fails, [EVIL])})
    table.backfill(f"c{EVIL}")
    view = db.create_materialized_view("v", table.search(None).where(f"id < 9 /*{EVIL}*/"))
    view.refresh()
    return str(path)


@pytest.fixture
def db(made: str, monkeypatch: pytest.MonkeyPatch) -> str:
    quiet = Settings(jvm_archive=False, progress=False)
    monkeypatch.setattr(
        geneva, "connect", functools.partial(geneva.connect, runner=InProcessRunner, settings=quiet)
    )
    return made


def run(*arguments: str) -> Result:
    result = invoke(list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not ACTING.search(result.output), repr(result.output)
    return result


COMMANDS = (
    ["tables"],
    ["describe", "t"],
    ["describe", "v"],
    ["sample", "t"],
    ["errors", "t"],
    ["plan", "t", f"c{EVIL}"],
    ["plan", "t", f"c{EVIL}", "--where", f"id < 9 /*{EVIL}*/"],
    ["verify", "t", f"c{EVIL}"],
    ["view", "list"],
    ["view", "plan", "v"],
    ["jobs", "list"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: "-".join(c)[:12])
def test_nothing_of_a_database_acts_on_the_terminal(db: str, command: list[str]) -> None:
    at = 2 if command[0] in ("view", "jobs") else 1
    words = [*command[:at], db, *command[at:]]
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    for line in shown.output.splitlines():
        assert not line.startswith("error: fake"), "one value, one line"
    as_json = run(*words, "--json")
    json.loads(as_json.stdout)


def test_json_holds_the_true_values(db: str) -> None:
    found = json.loads(run("sample", db, "t", "--json").stdout)
    assert found["rows"][0][EVIL] == EVIL
    (error,) = (
        e
        for e in json.loads(run("errors", db, "t", "--json").stdout)["errors"]
        if e["message"] == EVIL
    )
    assert error["column_name"] == f"c{EVIL}"


def test_a_jobs_page_has_no_line_of_a_strangers(db: str) -> None:
    listed = json.loads(run("jobs", "list", db, "--json").stdout)["jobs"]
    for job in listed:
        shown = run("jobs", "show", db, job["job_id"])
        assert not re.search(r"^error: fake", shown.output, re.MULTILINE)
        run("jobs", "watch", db, job["job_id"])


@pytest.mark.parametrize(
    "words",
    [
        [EVIL],
        ["describe", "{db}", EVIL],
        ["describe", EVIL, "t"],
        ["sample", "{db}", "t", "--where", EVIL],
        ["sample", "{db}", "t", f"--{EVIL}"],
        ["sample", "{db}", "t", "-n", EVIL],
        ["sample", "{db}", "t", "--columns", 2 * EVIL],
        ["jobs", EVIL],
        ["jobs", "show", "{db}", EVIL],
        ["jobs", "list", "{db}", "--status", EVIL],
        ["plan", "{db}", "t", "id", "--udf", EVIL],
        ["tables", "{db}", "--storage-option", EVIL],
        ["tables", f"foo://{EVIL}"],
        ["describe", "{db}", "\udcff"],
        ["describe", "{db}", "a\0b"],
    ],
    ids=range(15),
)
def test_nothing_of_a_command_line_acts_either(db: str, words: list[str]) -> None:
    result = run(*(word.replace("{db}", db) for word in words))
    assert result.exit_code == 2, result.output


def test_bars_logs_and_reprs(
    made: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressBars(EVIL) as bars:
        bars(JobProgress(total=2))
    assert "[bold]" in capsys.readouterr().err, "a name is no markup"
    LogSentences(logging.WARNING).emit(
        logging.LogRecord("x", logging.WARNING, "here.py", 1, "%s", (EVIL,), None)
    )
    monkeypatch.setattr("geneva.cli.terminal.out", Console(force_terminal=True, width=40))
    grid((EVIL,), [(EVIL,)])
    said = capsys.readouterr()
    for text in (re.sub("\x1b\\[[0-9;]*m", "", said.out), said.err):
        assert "\\u202e" in text
        assert not ACTING.search(text)
    table = geneva.connect(made).open_table("t")
    plan = table.plan_backfill(f"c{EVIL}", where=f"id < 9 /*{EVIL}*/")
    shown = [table, fails, plan, table.query(), table.verify(f"c{EVIL}"), fails.explain_version()]
    view = geneva.connect(made).open_table("v")
    assert isinstance(view, geneva.MaterializedView)
    for thing in (*shown, view, view.plan_refresh(), *geneva.connect(made).list_jobs()):
        for text in (str(thing), repr(thing)):
            assert not ACTING.search(text), repr(text)
            assert not re.search(r"^error: fake", text, re.MULTILINE)
        if hasattr(thing, "_repr_html_"):
            assert not ACTING.search(thing._repr_html_())


def test_a_shell_completes_no_name_that_acts(db: str) -> None:
    from types import SimpleNamespace
    from typing import Any

    from geneva.cli.arguments import complete_column

    context: Any = SimpleNamespace(params={"db": db, "table": "t"})
    assert complete_column(context, "") == []
    geneva.connect(db).open_table("t").add_columns({"fine": (fails, [EVIL])})
    assert complete_column(context, "") == ["fine"]
