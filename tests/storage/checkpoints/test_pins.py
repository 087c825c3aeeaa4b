"""Versions that running jobs read, and clean-up keeps its hands off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva.storage.checkpoints.pins import job_tags, pinned


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    uri = str(tmp_path / "table.lance")
    lance.write_dataset(pa.table({"a": [1]}), uri)
    lance.write_dataset(pa.table({"a": [2]}), uri, mode="append")
    return lance.dataset(uri, version=1)


def _versions(dataset: lance.LanceDataset) -> list[int]:
    return sorted(tag["version"] for tag in lance.dataset(dataset.uri).tags.list().values())


def test_the_version_of_the_dataset_is_pinned_meanwhile(dataset: lance.LanceDataset) -> None:
    with pinned(dataset, "job", lambda job_id: True):
        assert _versions(dataset) == [1]
        with pinned(lance.dataset(dataset.uri), "job", lambda job_id: True):
            assert _versions(dataset) == [1, 2]
        assert _versions(dataset) == [1]
    assert not job_tags(dataset)


def test_it_is_released_after_an_error(dataset: lance.LanceDataset) -> None:
    with pytest.raises(KeyError), pinned(dataset, "job", lambda job_id: True):
        raise KeyError
    assert not job_tags(dataset)


def test_what_dead_jobs_pinned_is_released(dataset: lance.LanceDataset) -> None:
    dataset.tags.create("mine", 2)
    dataset.tags.create("geneva-job-dead.0", 1)
    dataset.tags.create("geneva-job-alive.0", 1)
    with pinned(dataset, "new", lambda job_id: job_id != "dead"):
        tags = job_tags(dataset)
        assert "geneva-job-alive.0" in tags
        assert "geneva-job-dead.0" not in tags
    assert set(lance.dataset(dataset.uri).tags.list()) == {"mine", "geneva-job-alive.0"}


def test_a_table_that_may_only_be_read(
    dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise OSError("read only")

    monkeypatch.setattr(type(dataset.tags), "create", refused)
    with pinned(dataset, "job", lambda job_id: True, may_fail=True):
        assert not job_tags(dataset)
    with pytest.raises(OSError, match="read only"), pinned(dataset, "job", lambda job_id: True):
        pass
