"""Where things are, and what is shown of the keys that open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from geneva.model.tables import Secrets
from geneva.model.uris import local_path, resolve, same_place, table_uri, without_credentials


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


def test_credentials_are_not_shown() -> None:
    assert without_credentials("s3://user:hunter2@bucket/db?key=x") == "s3://bucket/db"
    assert without_credentials("/a/folder@home") == "/a/folder@home"


def test_no_storage_option_stays_in_a_text() -> None:
    options = {"key": "hunter", "token": "hunter2", "region": "eu", "allow_http": "true"}
    text = Secrets(options).redact("true: hunter2 and hunter in eu")
    assert text == "true: *** and *** in eu"
