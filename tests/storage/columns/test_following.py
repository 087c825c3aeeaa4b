"""Columns are followed from schema to schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from geneva.storage.columns.following import followed
from geneva.storage.lance.dataset import nodes_of
from geneva.storage.lance.history import History


class Changed:
    """A table whose columns are changed past Geneva, and where they have gone."""

    def __init__(self, uri: Path) -> None:
        struct = [{"x": 1, "z": {"q": 2}}]
        data = pa.table({"a": [1], "b": [2], "s": struct, "c": [3]})
        self.dataset = lance.write_dataset(data, uri)
        self.since = History(self.dataset).newest
        self.nodes = nodes_of(self.dataset.lance_schema)

    def renamed(self, path: str, name: str) -> None:
        self.dataset.alter_columns({"path": path, "name": name})

    def cast(self, *paths: str, **options: Any) -> None:
        self.dataset.alter_columns(
            *({"path": path, "data_type": pa.int32(), **options} for path in paths)
        )

    def overwritten(self, names: list[str]) -> None:
        data = self.dataset.to_table().select(names)
        self.dataset = lance.write_dataset(data, self.dataset.uri, mode="overwrite")

    def now(self, *paths: str) -> tuple[str, ...]:
        assert self.since is not None
        changes = History(self.dataset).changes_since(self.since)
        assert changes.complete
        return followed([(path, self.nodes[path]) for path in paths], changes.schemas)


@pytest.fixture
def table(tmp_path: Path) -> Changed:
    return Changed(tmp_path / "t.lance")


def test_names(table: Changed) -> None:
    assert table.now("a", "s.x") == ("a", "s.x")
    for path, name in (("a", "tmp"), ("b", "a"), ("tmp", "b"), ("s", "r"), ("r.x", "y")):
        table.renamed(path, name)
    assert table.now("a", "b", "s.x", "s.z.q") == ("b", "a", "r.y", "r.z.q")


def test_types(table: Changed) -> None:
    table.cast("a", "b")
    table.renamed("a", "new")
    table.cast("new", name="b2")
    table.renamed("b", "a")
    table.cast("s.x")
    table.renamed("s", "r")
    assert table.now("a", "b", "s.x", "s.z") == ("b2", "a", "r.x", "r.z")


def test_columns_that_are_dropped(table: Changed) -> None:
    """It is the next one that gets the name, and goes on to be it."""
    table.dataset.drop_columns(["a", "s.x"])
    assert table.now("a", "s.x", "b") == ("a", "s.x", "b")
    table.renamed("c", "a")
    table.renamed("a", "z")
    table.dataset.add_columns({"a": "b"})
    assert table.now("a", "b") == ("z", "b")


def test_a_column_beside_a_dropped_one_is_not_taken_for_it(table: Changed) -> None:
    table.dataset.drop_columns(["a"])
    table.cast("b")
    table.dataset.add_columns({"new": "b"})
    assert table.now("a", "b") == ("a", "b")


def test_ids_that_are_given_away_again(table: Changed) -> None:
    table.dataset.add_columns(pa.field("d", pa.int64()))
    table.since = History(table.dataset).newest
    table.nodes = nodes_of(table.dataset.lance_schema)
    table.dataset.drop_columns(["d"])
    table.dataset.add_columns(pa.field("x", pa.int64()))
    assert nodes_of(table.dataset.lance_schema)["x"] == table.nodes["d"]
    assert table.now("d") == ("d",)


def test_overwrites(table: Changed) -> None:
    for path, name in (("a", "tmp"), ("b", "a"), ("tmp", "b")):
        table.renamed(path, name)
    table.overwritten(["s", "a", "b"])
    assert table.now("a", "b", "c") == ("b", "a", "c")
    table.renamed("b", "z")
    table.overwritten(["z", "a"])
    assert table.now("a", "b", "s.x") == ("z", "a", "s.x")
