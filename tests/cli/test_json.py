"""`--json`: one document on standard output, whether a command does what it was asked or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import geneva
from geneva.cli import app
from geneva.execution.runner import InProcessRunner
from support import Calls, tripled

TAKES_NO_JSON = {"console", "demo"}
"""Those that talk to a person."""


@pytest.fixture
def db(tmp_path: Path, calls: Calls) -> str:
    connection = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    table = connection.create_table("t", [{"id": i} for i in range(3)])
    table.add_columns({"x": tripled(calls)})
    connection.create_materialized_view("v", table)
    return str(tmp_path / "db")


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
    }
    return [pytest.param(name.split(), given, id=name) for name, given in arguments.items()]


def known_commands(group: Any = None, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command of the app, by its words."""
    group = typer.main.get_command(app) if group is None else group
    if not hasattr(group, "commands"):
        return {" ".join(path): group}
    found: dict[str, Any] = {}
    for name, inner in group.commands.items():
        found.update(known_commands(inner, (*path, name)))
    return found


@pytest.mark.parametrize("command", sorted(known_commands().keys() - TAKES_NO_JSON))
def test_every_command_takes_it(command: str) -> None:
    assert any("--json" in parameter.opts for parameter in known_commands()[command].params)
    result = CliRunner().invoke(app, [*command.split(), "--no-such-option", "--json"])
    assert json.loads(result.stdout)["error"]["exit_code"] == result.exit_code == 2


@pytest.mark.parametrize(("command", "arguments"), commands())
def test_a_failure_is_one_document(db: str, command: list[str], arguments: list[str]) -> None:
    given = [argument.format(db=db) for argument in arguments]
    result = CliRunner().invoke(app, [*command, *given, "--json"])
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
    result = CliRunner().invoke(app, ["backfill", db, "t", "x", "--udf", "bad:f", "--json"])
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("UDFExecutionError", result.exit_code)
    assert geneva.connect(db).get_job(error["job_id"]).status == "FAILED"


def test_dropping_answers(db: str) -> None:
    result = CliRunner().invoke(app, ["view", "drop", db, "v", "--yes", "--json"])
    assert json.loads(result.stdout) == {"dropped": "v"}
