"""Partitions by vector, where programs for Geneva on Ray import them from."""

from __future__ import annotations

from geneva.storage.lance.database import ivf_flat
from geneva.table import Table


def create_ivf_flat_index(table: Table, column: str, k: int = 16) -> None:
    """Index a column of vectors by `k` partitions; LanceDB's IVF_FLAT."""
    table.create_index(column, config=ivf_flat(k))
