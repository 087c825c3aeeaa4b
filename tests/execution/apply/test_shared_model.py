"""One stateful function behind several columns: closed for one, made anew for the others."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import geneva
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker import program


@geneva.udf(data_type=pa.int64())
class Adds:
    def __init__(self, number: int) -> None:
        self.number = number

    def setup(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def __call__(self, x: pa.Array) -> pa.Array:
        assert self.is_open, "called after close()"
        return pc.add(x, self.number)


def test_a_column_whose_model_another_one_has_closed_gets_a_new_one(tmp_path: Path) -> None:
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    table = db.create_table("t", pa.table({"x": range(10)}))
    others = [f"c{i}" for i in range(program._MAX_LIVE)]
    for column in ("a", "b"):
        table.add_columns({column: Adds(1)})
    for number, column in enumerate(others):
        table.add_columns({column: Adds(10 + number)})
    for column in ("a", "b", *others[:-1]):  # the first program goes, and closes what is shared
        table.backfill(column)
    table.add(pa.table({"x": range(10, 20)}))
    table.backfill("b")
    assert sorted(table.to_arrow()["b"].to_pylist()) == list(range(1, 21))
