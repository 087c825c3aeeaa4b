"""Versions that running jobs read, and clean-up keeps its hands off."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva.errors import TableChangedError
from geneva.model.tables import TableRef
from geneva.storage.checkpoints.pins import cleanup_versions, job_tags, listing_tags, pinned


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


class Failing:
    """A method that raises each of some errors once, before it does what it does."""

    def __init__(self, real: Any, *errors: Exception) -> None:
        self.real, self.errors = real, list(errors)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self.real(*args, **options)


GONE = "Not found: t.lance/_refs/tags/geneva-job-1.json"


def test_a_tag_that_goes_while_tags_are_listed(dataset: lance.LanceDataset) -> None:
    dataset.tags.create("mine", 1)
    listing = Failing(dataset.tags.list, OSError(GONE), RuntimeError(f"lance error: {GONE}"))
    assert set(listing_tags(listing)) == {"mine"}
    with pytest.raises(OSError, match="another"):
        listing_tags(Failing(dataset.tags.list, OSError("another file: Not found")))


def test_a_tag_that_goes_while_versions_are_cleaned_up(
    dataset: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lance.LanceDataset.cleanup_old_versions
    failing = Failing(lambda **options: real(lance.dataset(dataset.uri), **options), OSError(GONE))
    monkeypatch.setattr(lance.LanceDataset, "cleanup_old_versions", lambda self, _, **o: failing())
    cleanup_versions(TableRef("t", dataset.uri), lambda job_id: True, timedelta(7))
    assert not failing.errors


def test_a_source_that_was_cleaned_up_before_it_was_pinned(dataset: lance.LanceDataset) -> None:
    lance.dataset(dataset.uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    pin = pinned(dataset, "job", lambda job_id: True, may_fail=True)
    with pytest.raises(TableChangedError, match="was cleaned up before the job"), pin:
        pass


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
