"""Opening tables at versions that are there, and at others."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from geneva.errors import TableNotFoundError
from geneva.model.tables import TableRef
from geneva.storage.lance.dataset import has_versions, open_dataset


@pytest.mark.parametrize("version", [2, 0, -1, 2**64, 10**20, "no such tag"])
def test_a_version_that_is_not_there(tmp_path: Path, version: int | str) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": [1]}), uri)
    ref = TableRef("t", uri)
    assert has_versions(ref)
    with pytest.raises(TableNotFoundError, match=f"'t' at version {version}"):
        open_dataset(ref, version)
