"""The connection, where programs for Geneva on Ray import it from."""

from __future__ import annotations

from geneva.connection import Connection, connect
from geneva.storage.lance.dataset import Dataset

__all__ = ["Connection", "connect", "dataset_uses_stable_row_ids"]


def dataset_uses_stable_row_ids(dataset: Dataset) -> bool:
    """Whether the rows of a Lance dataset (`table.to_lance()`) have stable ids."""
    return bool(dataset.has_stable_row_ids)
