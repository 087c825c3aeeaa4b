"""`geneva trust`: what would run is shown, accepted and signed, and never loaded."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import Result

import geneva
from command_line import invoke
from geneva import udf
from geneva.config import Settings
from geneva.execution.runner import InProcessRunner
from geneva.trust import policy
from geneva.udf.declare import serialize_udf
from geneva.udf.reading import imported_names, source_text


class Evil:
    """What loading it does."""

    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('it was loaded')",)


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    real = geneva.connect
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENEVA_ACCEPTED_FUNCTIONS", str(tmp_path / "accepted"))
    monkeypatch.setenv("GENEVA_TRUST", "signed")
    monkeypatch.setenv("GENEVA_PROGRESS", "0")
    evil = Evil()

    @udf
    def shout(text: str) -> str:
        return text.upper() if evil else ""

    @udf
    def fine(text: str) -> str:
        return text + "!"

    db = real(tmp_path / "db", settings=Settings())
    db.create_table("t", pa.table({"text": ["a"]})).add_columns({"c": shout, "d": fine})
    monkeypatch.setattr(policy, "_declared_here", set())
    monkeypatch.setattr(geneva, "connect", functools.partial(real, runner=InProcessRunner))
    return str(tmp_path / "db")


def run(*arguments: str, code: int = 0) -> Result:
    result = invoke(list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_a_function_is_refused_looked_at_accepted_and_forgotten(db: str, tmp_path: Path) -> None:
    refused = run("backfill", db, "t", "d", code=1)
    assert "geneva trust show" in refused.stderr
    assert "no: it is not signed" in run("trust", "list", db).stdout
    shown = run("trust", "show", db, "t", "c").stdout
    for word in ("def shout", "builtins.exec", "digest", "t.c", "@", "no: it is not signed"):
        assert word in shown
    found = json.loads(run("trust", "show", db, "t", "d", "--json").stdout)
    assert found["column"] == "d"
    assert found["inputs"] == ["text"]
    assert "def fine" in found["source"]
    assert "builtins.exec" not in found["imports"]
    run("trust", "accept", db, "t", "d", "--yes")
    run("backfill", db, "t", "d")
    assert "yes: accepted" in run("trust", "list", db).stdout
    run("trust", "forget", db, "t", "d")
    run("trust", "forget", db, "t", "d", code=2)
    assert "yes" not in run("trust", "list", db).stdout
    for words in (["show", db, "t", "text"], ["accept", db, "none", "c"], ["show", db, "t", ""]):
        run("trust", *words, code=2)


def test_functions_are_signed(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("trust", "keygen", "alice").stdout
    key = tmp_path / "alice.key"
    assert key.stat().st_mode & 0o077 == 0
    assert key.read_text().split()[2] not in made
    run("trust", "keygen", "alice", code=2)
    run("trust", "sign", db, "t", "d", code=2)
    monkeypatch.setenv("GENEVA_SIGNING_KEY", str(key))
    assert run("trust", "sign", db, "t", "d").stdout == "Signed: d.\n"
    run("trust", "sign", db, "t", "nothing", code=2)
    monkeypatch.delenv("GENEVA_SIGNING_KEY")
    run("backfill", db, "t", "d", code=1)
    monkeypatch.setenv("GENEVA_TRUSTED_KEYS", made.splitlines()[-1])
    run("backfill", db, "t", "d")
    assert "signed with key 'alice'" in run("trust", "list", db).stdout
    assert "not signed" in run("trust", "list", db).stdout, "of the other one"


def test_reading_a_function_runs_nothing_of_it() -> None:
    evil = Evil()

    @udf
    def shout(text: str) -> str:
        return text if evil else ""

    assert "def shout" in source_text(shout)
    data = serialize_udf(shout)
    assert "builtins.exec" in imported_names(data)
    for cut in range(0, len(data), 37):
        imported_names(data[:cut])
    assert source_text(udf(eval("lambda text: text"), data_type=pa.string())) == ""
