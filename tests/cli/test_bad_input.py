"""Whatever a command is given: one message, an exit code, and a traceback only where asked for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import Result

import geneva
from command_line import invoke
from geneva import udf
from geneva.errors import StorageUnavailableError, TableNotFoundError, UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.model.tables import Secrets
from geneva.storage.lance.database import _in_time, open_database, opening
from geneva.udf.policy import skip_on_error

NAMES = ("a b", "../x", "", "..", "/etc/passwd", "t@", "t@none", "$", "x" * 300, "é", "%s", "{}")
URIS = (
    "",
    "foo://x",
    "://",
    "gs://x y",
    "s3://",
    "http://127.0.0.1:1/x",
    "/nonexistent",
    "az://",
    "db://x",
)
NUMBERS = ("-1", "nan", "inf", "9" * 30, "9" * 5000, "x", "")
BY_TABLE = (
    ["sample", "{db}", "{}"],
    ["plan", "{db}", "{}", "u"],
    ["verify", "{db}", "{}", "u"],
    ["backfill", "{db}", "{}", "u"],
    ["errors", "{db}", "{}"],
    ["view", "plan", "{db}", "{}"],
    ["view", "refresh", "{db}", "{}"],
    ["view", "drop", "{db}", "{}", "--yes"],
    ["view", "create", "{db}", "new", "--source", "{}"],
    ["jobs", "show", "{db}", "x{}"],
    ["jobs", "cancel", "{db}", "x{}"],
    ["plan", "{db}", "t", "x{}"],
    ["plan", "{db}", "t", "u", "--udf", "{}"],
    ["sample", "{db}", "t", "--columns", "x{}"],
    ["sample", "{db}", "t", "--where", "{} ("],
)
BY_URI = (["describe", "{}", "t"], ["jobs", "list", "{}"], ["view", "list", "{}"])
BY_NUMBER = (
    ["verify", "{db}", "t", "u", "--sample", "{}"],
    ["plan", "{db}", "t", "u", "--read-version", "{}"],
    ["plan", "{db}", "t", "u", "--num-frags", "{}"],
    ["console", "{db}", "--port", "{}"],
)


@udf
def upper(text: str) -> str:
    return text.upper()


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("input") / "db"
    geneva.connect(path).create_table("t", pa.table({"text": ["a"]})).add_columns({"u": upper})
    return str(path)


def run(*arguments: str) -> Result:
    result = invoke(list(arguments))
    assert isinstance(result.exception, SystemExit), (arguments, result.exception)
    return result


@pytest.mark.parametrize(
    ("command", "values"),
    [
        (["describe", "{db}", "{}"], NAMES[:3]),
        (["tables", "{}"], URIS[:3]),
        (["sample", "{db}", "t", "-n", "{}"], NUMBERS),
        *(pytest.param(command, NAMES, marks=pytest.mark.slow) for command in BY_TABLE),
        *(pytest.param(command, URIS, marks=pytest.mark.slow) for command in BY_URI),
        *(pytest.param(command, NUMBERS, marks=pytest.mark.slow) for command in BY_NUMBER),
    ],
    ids=lambda part: "-".join(part)[:30],
)
def test_bad_input_is_one_message(db: str, command: list[str], values: tuple[str, ...]) -> None:
    for value in values:
        if value == "t@" and "{db}" in command:
            continue  # is table t
        words = [word.replace("{db}", db).replace("{}", value) for word in command]
        result = run(*words)
        assert result.exit_code == 2, (words, result.output)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert "--debug" not in result.stderr, f"nobody foresaw {result.stderr}"


def test_a_traceback_is_there_for_who_asks(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run("--debug", "describe", db, "a b").stderr
    monkeypatch.setenv("GENEVA_DEBUG", "1")
    shown = run("describe", db, "a b").stderr
    assert shown.rstrip().splitlines()[-1].startswith("error: ")
    monkeypatch.setenv("GENEVA_DEBUG", "0")
    assert "Traceback" not in run("describe", db, "a b").stderr


def test_what_nobody_foresaw_is_a_message_too(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    for number, error in enumerate((KeyError("x"), Panic("gone"), MemoryError())):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(geneva, "connect", fail)
        result = run("tables", db)
        assert result.exit_code == 1, number
        assert result.stderr.startswith(f"error: {type(error).__name__}")


# ---------------------------------------------------------------------------- stores out of reach

KEYS = {"aws_access_key_id": "AKIDSECRET", "aws_secret_access_key": "verysecret"}
S3 = {**KEYS, "aws_region": "us-east-1", "allow_http": "true", "client_max_retries": "0"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid:80"])
def test_a_store_that_cant_be_reached_is_said_in_a_sentence(endpoint: str) -> None:
    with pytest.raises(StorageUnavailableError) as caught:
        geneva.connect(
            "s3://user:password@bucket/x", storage_options=S3 | {"aws_endpoint": endpoint}
        )
    text = str(caught.value)
    assert text.startswith("Database 's3://bucket/x' can't be reached: ")
    assert len(text) < 400
    assert not [hidden for hidden in (*KEYS.values(), "password") if hidden in text]


def test_a_bucket_without_region_is_said_in_a_sentence() -> None:
    text = "LanceError(IO): Generic S3 error: Failed to resolve region for 'b', /home/x.rs:3:1"
    message = pytest.raises(StorageUnavailableError, match="resolve region")
    with message as caught, opening("s3://b/x", Secrets()):
        raise OSError(text)
    assert "x.rs" not in str(caught.value)


def test_a_store_that_never_answers_is_given_up() -> None:
    from threading import Event

    with pytest.raises(TimeoutError, match=r"did not answer in 0\.05 s"):
        _in_time(Event().wait, 0.05)
    with pytest.raises(TimeoutError, match="its own"):
        _in_time(lambda: (_ for _ in ()).throw(TimeoutError("its own")), 5)


def test_a_file_is_no_database(tmp_path: Path) -> None:
    from geneva.model.tables import Secrets

    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file"), f"file://{tmp_path}/file"):
        with pytest.raises(UserInputError, match="can't be opened"):
            open_database(place, Secrets(), {})
    assert len(list(itertools.islice(tmp_path.iterdir(), 5))) == 1


# ------------------------------------------------------------------------ names that are not there


def test_a_table_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    db = geneva.connect(tmp_path / "db")
    for name in ("articles", "pictures"):
        db.create_table(name, [{"id": 1}])
    db.open_table("articles").branches.create("next")
    said = run("describe", db.uri, "Article").stderr
    assert said.endswith("Did you mean 'articles'? Tables: articles, pictures.\n")
    said = run("describe", db.uri, "articles@nxt").stderr
    assert said.endswith("Did you mean 'next'? Branches: next.\n")


def test_a_view_that_is_none_is_not_dropped(db: str) -> None:
    missing = run("view", "drop", db, "nope", "--yes")
    assert missing.stderr == f"error: There is no table 'nope' in {db}. Tables: t.\n"
    table = run("view", "drop", db, "t", "--yes")
    assert table.stderr.endswith("open it with open_table, drop it with drop_table.\n")
    assert (missing.exit_code, table.exit_code) == (2, 2)


def test_to_drop_a_view_that_is_not_there_warns_of_nothing(
    db: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = geneva.connect(db)
    for call in (connection.drop_materialized_view, connection.open_materialized_view):
        with pytest.raises(TableNotFoundError, match="There is no table 'nope'"):
            call("nope")
    assert caplog.text == ""


@pytest.mark.parametrize("command", [["view", "drop", "v"], ["trust", "accept", "t", "u"]])
def test_a_question_that_nobody_answers(tmp_path: Path, command: list[str]) -> None:
    connection = geneva.connect(tmp_path / "db")
    table = connection.create_table("t", pa.table({"text": ["a"]}))
    table.add_columns({"u": upper})
    connection.create_materialized_view("v", table)
    first, second, *names = command
    words = [first, second, connection.uri, *names]
    result = invoke(words, input="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("error: it was not confirmed, and nothing was done: use --yes.\n")
    told = invoke([*words, "--json"], input="")
    assert json.loads(told.stdout)["error"]["exit_code"] == told.exit_code == 2
    assert invoke(words, input="no\n").exit_code == 1
    assert invoke(words, input="Yes\n").exit_code == 0


def test_records_are_asked_for_by_names_that_are_there_or_were(tmp_path: Path) -> None:
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    for name in ("articles", "dropped"):
        table = db.create_table(name, [{"id": 1}])
        table.add_columns({"x": udf(_fails, data_type=pa.int64(), on_error=skip_on_error())})
        table.backfill("x")
    db.drop_table("dropped")
    table = db.open_table("articles")
    table.drop_columns(["x"])
    said = run("errors", db.uri, "articles", "--column", "idd")
    assert (said.exit_code, said.stdout) == (2, "")
    assert "has no column 'idd'. Did you mean 'id'?" in said.stderr
    said = run("jobs", "list", db.uri, "--table", "article")
    assert (said.exit_code, said.stdout) == (2, "")
    assert "There is no table 'article'" in said.stderr
    assert "Did you mean 'articles'?" in said.stderr
    for words in (
        ["errors", db.uri, "articles", "--column", "id"],
        ["errors", db.uri, "articles", "--column", "x"],
        ["jobs", "list", db.uri, "--table", "dropped"],
        ["jobs", "list", db.uri, "--table", "dropped", "--status", "failed"],
    ):
        assert invoke(words).exit_code == 0, words


def _fails(id: int) -> int:
    raise ValueError("never works")
