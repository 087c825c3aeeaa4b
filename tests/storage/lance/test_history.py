"""What the commits behind a version of a table say, and when nobody knows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva.model.tables import CommitId
from geneva.storage.lance import history
from geneva.storage.lance.dataset import FieldsNow
from geneva.storage.lance.history import History


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    return lance.write_dataset(pa.table({"a": [1], "b": [2]}), tmp_path / "t.lance")


def commit_of(dataset: lance.LanceDataset) -> CommitId:
    found = History(dataset).newest
    assert found is not None
    return found


def names_since(dataset: lance.LanceDataset, since: CommitId | str) -> list[list[str]]:
    """The columns that it had from that commit on."""
    changes = History(dataset).changes_since(since)
    assert changes.complete
    return [seen.schema.to_pyarrow().names for seen in changes.schemas]


def test_a_commit_is_found_behind_others(dataset: lance.LanceDataset) -> None:
    first = commit_of(dataset)
    dataset.add_columns({"c": "a + 1"})
    dataset.insert(pa.table({"a": [1], "b": [2], "c": [3]}))
    assert names_since(dataset, first) == [["a", "b"], ["a", "b", "c"]]
    assert names_since(dataset, "c") == [["a", "b", "c"]]
    assert names_since(dataset, commit_of(dataset)) == [["a", "b", "c"]], "of a commit without one"
    lance.write_dataset(dataset.to_table().select(["b"]), dataset.uri, mode="overwrite")
    changes = History(lance.dataset(dataset.uri)).changes_since(first)
    assert [seen.overwrote for seen in changes.schemas] == [False, False, True]
    assert [seen.schema.to_pyarrow().names for seen in changes.since_overwrite] == [["b"]]


def test_a_table_that_is_made_anew_has_its_versions_and_not_its_commits(
    dataset: lance.LanceDataset,
) -> None:
    first = commit_of(dataset)
    assert names_since(dataset, first) == [["a", "b"]]
    data = dataset.to_table()
    shutil.rmtree(dataset.uri)
    anew = lance.write_dataset(data.select(["b", "a"]), dataset.uri)
    assert commit_of(anew).version == first.version
    changes = History(anew).changes_since(first)
    assert not changes.complete
    assert [seen.schema.to_pyarrow().names for seen in changes.since_overwrite] == [["b", "a"]]


def test_commits_are_read_once(
    dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by other handles, and for versions that come after: each is a request to the store."""
    first, asked = commit_of(dataset), list[int]()
    for _ in range(20):
        dataset.delete("false")
    real = history.read_transaction

    def noted(dataset: lance.LanceDataset, version: int) -> Any:
        asked.append(version)
        return real(dataset, version)

    monkeypatch.setattr(history, "read_transaction", noted)
    for _ in range(3):
        assert names_since(lance.dataset(dataset.uri), first) == [["a", "b"]]
    assert sorted(asked) == [*range(1, 21), 21, 21, 21]
    asked.clear()
    dataset.add_columns({"c": "a + 1"})
    same = lance.dataset(dataset.uri)
    for _ in range(3):
        assert names_since(same, first) == [["a", "b"], ["a", "b", "c"]]
    assert asked == [22, 21]


def test_a_table_behind_a_clone_that_is_gone_and_one_that_can_not_be_reached(
    dataset: lance.LanceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit_of(dataset)
    clone, known = (
        dataset.shallow_clone(str(tmp_path / name), dataset.version) for name in ("clone", "known")
    )
    assert names_since(known, first) == [["a", "b"]]

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patched:
        patched.setattr(history.lance, "dataset", unreachable)
        with pytest.raises(OSError, match="503"):
            History(clone).changes_since(first)
    shutil.rmtree(dataset.uri)
    assert not History(clone).changes_since(first).complete
    assert names_since(known, first) == [["a", "b"]], "found out before"


def test_fields_stay_those_of_one_version(dataset: lance.LanceDataset) -> None:
    fields, again = FieldsNow.of(dataset), FieldsNow.of(dataset)
    first = commit_of(dataset)
    dataset.update_field_metadata({"a": {"k": "v"}})
    assert (fields.version, fields.history.newest) == (1, first)
    assert fields == again
    assert FieldsNow.of(dataset).version == 2
