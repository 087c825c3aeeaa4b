"""Where things are, and what is shown of the keys that open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from geneva.errors import UserInputError
from geneva.model.tables import Secrets, TableRef
from geneva.model.uris import (
    TableName,
    branch_uri,
    local_path,
    resolve,
    same_place,
    table_uri,
    without_credentials,
    without_file_scheme,
)


def test_local_folders_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve("db") == str(tmp_path / "db")
    assert resolve(Path("~/db")) == "/home/me/db"
    assert local_path("db") == tmp_path / "db"


def test_uris_stay_as_they_are() -> None:
    assert resolve("s3://bucket/db/") == "s3://bucket/db/"
    assert local_path("s3://bucket/db") is None
    assert table_uri("s3://bucket/db/", "t") == table_uri("s3://bucket/db", "t")
    assert same_place("s3://bucket/db/", "s3://bucket/db")
    assert not same_place("s3://bucket/db", "s3://bucket/other")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t", TableName("t")),
        ("t@rel/1.0", TableName("t", branch="rel/1.0")),
        ("a$b$t", TableName("t", ("a", "b"))),
        ("a$t@rel", TableName("t", ("a",), "rel")),
    ],
)
def test_names_of_branches_and_in_namespaces(text: str, name: TableName) -> None:
    assert TableName.parse(text) == name
    assert str(name) == text


def test_a_branch_is_inside_its_table() -> None:
    assert table_uri("/a@b/db", "t@rel/1.0") == "/a@b/db/t.lance/tree/rel/1.0"
    assert branch_uri("s3://bucket/db/t.lance", None) == "s3://bucket/db/t.lance"
    ref = TableRef("t@rel/1.0", table_uri("db", "t@rel/1.0"), branch="rel/1.0")
    assert ref.root == table_uri("db", "t")
    assert TableRef("t", "db/t.lance").root == "db/t.lance"


def test_quoted_file_uris_are_paths() -> None:
    assert without_file_scheme("file:///a%20b/c%2520$t") == "/a b/c%20$t"
    for scheme in ("file:", "file://", "FILE://", "file://localhost"):
        assert resolve(f"{scheme}/a/b%20c#d?e") == "/a/b c#d?e"
        assert local_path(f"{scheme}/a") == Path("/a")
    assert resolve(Path("file:///a")) == "/a"
    for none in ("file:a/b", "file://a/b", "file:", "file://"):
        with pytest.raises(UserInputError, match="file:///an/absolute/path"):
            resolve(none)
    assert without_file_scheme("/a%20b") == "/a%20b"
    assert without_file_scheme("s3://bucket/a%20b") == "s3://bucket/a%20b"


def test_credentials_are_not_shown() -> None:
    assert without_credentials("s3://user:hunter2@bucket/db?key=x") == "s3://bucket/db"
    assert without_credentials("/a/folder@home") == "/a/folder@home"


def test_no_storage_option_stays_in_a_text() -> None:
    options = {"key": "hunter", "token": "hunter2", "region": "eu", "allow_http": "true"}
    text = Secrets(options).redact("true: hunter2 and hunter in eu")
    assert text == "true: *** and *** in eu"
