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


def overwritten_since(dataset: lance.LanceDataset, since: CommitId | str) -> list[str] | None:
    """The columns that it was overwritten with; None: it was not."""
    search = History(dataset).overwrite_since(since)
    assert search.complete
    return None if search.commit is None else search.schema.to_pyarrow().names


def test_a_commit_is_found_behind_others(dataset: lance.LanceDataset) -> None:
    first = commit_of(dataset)
    dataset.add_columns({"c": "a + 1"})
    dataset.insert(pa.table({"a": [1], "b": [2], "c": [3]}))
    assert overwritten_since(dataset, first) is None
    assert overwritten_since(dataset, "c") is None
    lance.write_dataset(dataset.to_table().select(["b"]), dataset.uri, mode="overwrite")
    assert overwritten_since(lance.dataset(dataset.uri), first) == ["b"]


def test_a_table_that_is_made_anew_has_its_versions_and_not_its_commits(
    dataset: lance.LanceDataset,
) -> None:
    first = commit_of(dataset)
    data = dataset.to_table()
    shutil.rmtree(dataset.uri)
    anew = lance.write_dataset(data, dataset.uri)
    assert commit_of(anew).version == first.version
    assert overwritten_since(anew, first) == ["a", "b"]


def test_a_table_behind_a_clone_that_is_gone_and_one_that_can_not_be_reached(
    dataset: lance.LanceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit_of(dataset)
    clone = dataset.shallow_clone(str(tmp_path / "clone.lance"), dataset.version)
    assert overwritten_since(clone, first) is None

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patched:
        patched.setattr(history.lance, "dataset", unreachable)
        with pytest.raises(OSError, match="503"):
            History(clone).overwrite_since(first)
    shutil.rmtree(dataset.uri)
    assert not History(clone).overwrite_since(first).complete


def test_fields_stay_those_of_one_version(dataset: lance.LanceDataset) -> None:
    fields, again = FieldsNow.of(dataset), FieldsNow.of(dataset)
    first = commit_of(dataset)
    dataset.update_field_metadata({"a": {"k": "v"}})
    assert (fields.version, fields.history.newest) == (1, first)
    assert fields == again
    assert FieldsNow.of(dataset).version == 2
