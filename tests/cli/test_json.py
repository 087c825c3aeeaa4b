"""`--json`: one document on standard output, whether a command does what it was asked or not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import command_line
import geneva
from command_line import invoke
from geneva.execution.runner import InProcessRunner
from support import Prototypes, tripled


def a_table_and_a_view(connection: geneva.Connection, prototypes: Prototypes) -> None:
    table = connection.create_table("t", [{"id": i} for i in range(3)])
    table.add_columns({"x": tripled(prototypes.calls())})
    connection.create_materialized_view("v", table)


@pytest.fixture
def db(tmp_path: Path, prototypes: Prototypes) -> str:
    return prototypes.copy(a_table_and_a_view, tmp_path / "db").uri


def commands() -> list[Any]:
    """Commands with arguments that name what is not there."""
    arguments = {
        "tables": ["{db}/no"],
        "describe": ["{db}", "nope"],
        "sample": ["{db}", "nope"],
        "plan": ["{db}", "t", "nope"],
        "backfill": ["{db}", "t", "nope"],
        "verify": ["{db}", "t", "nope"],
        "errors": ["{db}", "nope"],
        "view create": ["{db}", "w", "--source", "nope"],
        "view refresh": ["{db}", "nope"],
        "view plan": ["{db}", "nope"],
        "view list": ["{db}/no"],
        "view drop": ["{db}", "nope", "--yes"],
        "jobs list": ["{db}/no"],
        "jobs show": ["{db}", "ffff"],
        "jobs cancel": ["{db}", "ffff"],
        "jobs watch": ["{db}", "ffff"],
        "jobs logs": ["{db}", "ffff"],
        "doctor": ["{db}/no", "--no-spark"],
        "trust forget": ["{db}", "t", "nope"],
        "trust accept": ["{db}", "t", "nope", "--yes"],
        "trust sign": ["{db}", "nope"],
        "refresh": ["{db}/no"],
    }
    return [pytest.param(name.split(), given, id=name) for name, given in arguments.items()]


def commands_of(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command of a group, by its words."""
    if not hasattr(group, "commands"):
        return {" ".join(path): group}
    found: dict[str, Any] = {}
    for name, inner in group.commands.items():
        found.update(commands_of(inner, (*path, name)))
    return found


@cache
def known_commands() -> dict[str, Any]:
    """Every command of the app, to look at."""
    return commands_of(command_line.command())


EVERY_COMMAND = sorted(known_commands())


def given_names(command: str, *, db: str, name: str) -> list[str]:
    """A command with its arguments: the database, and a name for each of the others."""
    parameters = known_commands()[command].params
    arguments = [p.name for p in parameters if p.param_type_name == "argument"]
    return [*command.split(), *(db if argument == "db" else name for argument in arguments)]


def only_document(result: Any) -> Any:
    """The one document that a command printed, and nothing besides."""
    document = json.loads(result.stdout)
    assert result.stdout.count("\n{") == 0
    return document


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_wrong_arguments(command: str) -> None:
    known = known_commands()[command]
    assert any("--json" in parameter.opts for parameter in known.params)
    named = given_names(command, db="db", name="t")
    wrong = [[*named, "more"], [*command.split(), "--no-such-option"]]
    wrong += [command.split()] if any(p.required for p in known.params) else []
    for arguments in wrong:
        result = invoke([*arguments, "--json"])
        error = only_document(result)["error"]
        assert (error["type"], error["exit_code"]) == ("UsageError", result.exit_code)


OF_A_DATABASE = [
    command
    for command, known in known_commands().items()
    if any(p.name == "db" for p in known.params)
]
MORE = {
    "load-columns": ["--pk", "id", "--columns", "y"],
    "view create": ["--source", "t"],
    "view drop": ["--yes"],
    "doctor": ["--no-spark"],
    "trust accept": ["--yes"],
    "preview": ["--udf", "nowhere:f"],
}
"""Options that a command can't be run without, or that keep it from asking."""


@pytest.mark.parametrize("place", ["{folder}/no", "db://service", "\udcff"])
def test_a_database_that_is_none(tmp_path: Path, place: str) -> None:
    for command in OF_A_DATABASE:
        arguments = given_names(command, db=place.format(folder=tmp_path), name="t")
        result = invoke([*arguments, *MORE.get(command, ()), "--json"])
        assert result.exit_code != 0, command
        document = only_document(result)
        assert command == "doctor" or document["error"]["exit_code"] == result.exit_code


def interrupted_in(
    command: str, when: Callable[[Any], Any], capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[Any, Any]:
    """What a command answers, and its exit code, whose function is `when` of its own one."""
    here = known_commands()[command]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(here, "callback", when(here.callback))
        for parameter in here.params:
            patched.setattr(parameter, "required", False)
        with pytest.raises(SystemExit) as leaving:
            command_line.command()([*command.split(), *given, "--json"])
    shown = capsys.readouterr().out
    assert shown.count("\n{") == 0
    return json.loads(shown), leaving.value.code


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (typer.Abort, 1)])
def test_a_command_that_is_interrupted(
    capsys: pytest.CaptureFixture[str], kind: type[BaseException], code: int
) -> None:
    def at_once(own: Any) -> Any:
        def interrupted(**given: Any) -> None:
            raise kind

        return interrupted

    for command in EVERY_COMMAND:
        document, left = interrupted_in(command, at_once, capsys)
        error = document["error"]
        assert (error["type"], error["exit_code"], left) == (kind.__name__, code, code), command


def test_an_answer_is_the_only_one(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    def after_it(own: Any) -> Any:
        def interrupted(**given: Any) -> None:
            own(**given)
            raise KeyboardInterrupt

        return interrupted

    document, left = interrupted_in("tables", after_it, capsys, db)
    assert {table["name"] for table in document["tables"]} == {"t", "v"}
    assert left == 130


@pytest.mark.parametrize(("command", "arguments"), commands())
def test_a_failure_is_one_document(db: str, command: list[str], arguments: list[str]) -> None:
    given = [argument.format(db=db) for argument in arguments]
    result = invoke([*command, *given, "--json"])
    assert result.exit_code != 0
    document = json.loads(result.stdout)
    if command == ["doctor"]:
        return
    error = document["error"]
    assert error["exit_code"] == result.exit_code
    assert error["message"]
    assert error["type"].endswith("Error")


def test_a_failed_job_is_named(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text("def f(id: int) -> int:\n    return 1 // 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "geneva.connection.Connection._spark_runner", lambda self: InProcessRunner()
    )
    result = invoke(["backfill", db, "t", "x", "--udf", "bad:f", "--json"])
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("UDFExecutionError", result.exit_code)
    assert geneva.connect(db).get_job(error["job_id"]).status == "FAILED"
    assert 'bad.py", line 2, in f' in "".join(error["notes"])


def test_people_see_the_line_that_failed(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worse.py").write_text("def f(id: int) -> int:\n    return 1 // 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "geneva.connection.Connection._spark_runner", lambda self: InProcessRunner()
    )
    for debug in ([], ["--debug"]):
        result = invoke([*debug, "backfill", db, "t", "x", "--udf", "worse:f"])
        assert result.exit_code == 1
        assert result.stderr.count('worse.py", line 2, in f') == 1


def test_the_demo_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "geneva.connection.Connection._spark_runner", lambda self: InProcessRunner()
    )
    given = ["demo", "--rows", "8", "--dir", str(tmp_path / "d"), "--json"]
    told = only_document(invoke(given))
    assert (told["database"], told["table"], told["rows"]) == (str(tmp_path / "d"), "pictures", 10)
    assert [job["rows_computed"] for job in told["jobs"]] == [8] * 3 + [2] * 3 + [0] * 3
    again = only_document(invoke(given))
    assert again["error"]["type"] == "UserInputError"


def test_dropping_answers(db: str) -> None:
    result = invoke(["view", "drop", db, "v", "--yes", "--json"])
    assert json.loads(result.stdout) == {"dropped": "v"}


PRINTS = """
import geneva

print("printed on import")

@geneva.udf
def loud(id: int) -> int:
    print("printed in a call")
    return id * 3
"""


@pytest.mark.parametrize(
    "command",
    [
        ["preview", "{db}", "t", "--udf", "prints:loud"],
        ["plan", "{db}", "t", "x", "--udf", "prints:loud"],
        ["backfill", "{db}", "t", "y", "--udf", "prints:loud", "--save"],
        ["view", "create", "{db}", "w", "--source", "t", "--add", "y=prints:loud"],
        ["preview", "{db}", "t", "--udf", "prints:nothing"],
    ],
    ids=lambda command: " ".join(command[:2]) + command[-1],
)
def test_what_users_print_is_no_part_of_the_document(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "prints", raising=False)
    monkeypatch.setattr(
        "geneva.connection.Connection._spark_runner", lambda self: InProcessRunner()
    )
    given = [word.format(db=db) for word in command]
    result = invoke([*given, "--json"])
    assert only_document(result), result.stderr
    assert "printed on import" in result.stderr
    assert result.exit_code == (2 if "prints:nothing" in command else 0)


def test_what_a_verification_prints_is_no_part_of_the_document(tmp_path: Path) -> None:
    @geneva.udf
    def loud(id: int) -> int:
        print("printed in a call")  # noqa: T201
        return id * 3

    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    table = db.create_table("t", [{"id": 1}])
    table.add_columns({"x": loud})
    table.backfill("x")
    result = invoke(["verify", db.uri, "t", "x", "--run", "--json"])
    assert only_document(result)["ok"], result.stderr
    assert "printed in a call" in result.stderr


def test_what_users_print_at_the_very_end_is_no_part_of_the_document(
    db: str, tmp_path: Path
) -> None:
    at_the_end = "import atexit\n\natexit.register(print, 'printed at the end')\n"
    (tmp_path / "prints.py").write_text(PRINTS + at_the_end)
    ran = subprocess.run(
        [sys.executable, "-m", "geneva.cli", "preview", db, "t", "--udf", "prints:loud", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert [row["value"] for row in only_document(ran)["rows"]] == [0, 3, 6]
    assert "printed at the end" in ran.stderr


def test_help_is_shown_where_it_is_read() -> None:
    result = invoke(["describe", "--json", "--help"])
    assert (result.exit_code, "Usage" in result.stdout) == (0, True)
