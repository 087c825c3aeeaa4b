"""What a process remembers of tables is bounded, however many commits it makes."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva.model.tables import TableRef
from geneva.storage.lance import session
from geneva.storage.lance.dataset import open_dataset


def test_commits_through_one_handle_leave_no_more_behind_than_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 256 * 1024
    monkeypatch.setattr(session, "_METADATA_BYTES", bound)
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"x": range(2_000)}), uri, max_rows_per_file=10)
    dataset = open_dataset(TableRef("t", uri))
    for number in range(20):
        dataset.update_config({"number": str(number)})
    assert dataset.session().size_bytes() <= bound
    assert open_dataset(TableRef("t", uri)).version == dataset.version == 21


def test_in_a_folder_each_handle_remembers_by_itself(tmp_path: Path) -> None:
    # A table that is dropped and made anew has files of the same names.
    uri = str(tmp_path / "t.lance")
    assert session.session_of(uri) is not session.session_of(uri)
    assert session.session_of("s3://bucket/t.lance") is session.session_of("s3://bucket/u.lance")
