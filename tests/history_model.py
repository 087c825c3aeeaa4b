"""What random histories share: UDFs that note their calls, and a model that knows what is stale."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from geneva import UDF, udf

CALLS: list[tuple[str, int | None]] = []
"""Every call of a UDF in this process: the column, and the input it was called with."""


def compute(column: str, udf_number: int, value: int | None) -> int | None:
    """Compute a cell: different for every column, UDF and input, except that some are NULL."""
    if value is None:
        return udf_number if column == "d" else None
    if value % 5 == 3:
        return None
    return value * 100 + udf_number + (50 if column == "d" else 0)


def make_udf(column: str, udf_number: int) -> UDF:
    """Make version `udf_number` of a column's UDF."""

    def function(value: int | None) -> int | None:
        from history_model import CALLS, compute

        CALLS.append((column, value))
        return compute(column, udf_number, value)

    return udf(function, data_type=pa.int64(), version=f"{column}-{udf_number}")


@dataclass
class Cell:
    """A computed cell: its value, and what it was made by and from."""

    value: int | None = None
    made_by: tuple[int, int] | None = None
    """Generation of the column and number of the UDF; None: never computed."""
    made_from: int | None = None
    disturbed: bool = False
    """Its input was another one meanwhile, and may have come back."""


@dataclass
class Row:
    x: int | None
    other: str
    cells: dict[str, Cell]


@dataclass
class Model:
    """The table as it has to be, and the past of every computed cell."""

    columns: tuple[str, ...]
    rows: dict[int, Row] = field(default_factory=dict)
    udfs: dict[str, int] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    input_name: str = "x"

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def put(self, key: int, **values: Any) -> None:
        """Insert a row, or change what is given of it."""
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Row(None, "", {name: Cell() for name in self.columns})
        for name, value in values.items():
            setattr(row, name, value)
        self._note_disturbance(row)

    def _note_disturbance(self, row: Row) -> None:
        for name, cell in row.cells.items():
            if cell.made_by is not None and self.input_of(name, row) != cell.made_from:
                cell.disturbed = True

    @staticmethod
    def input_of(column: str, row: Row) -> int | None:
        return row.x if column == "c" else row.cells["c"].value

    def maker(self, column: str) -> tuple[int, int]:
        return self.generations[column], self.udfs[column]

    def is_stale(self, column: str, key: int) -> bool:
        """Whether the value was not computed by the current UDF from the current input."""
        row = self.rows[key]
        cell = row.cells[column]
        now = (self.maker(column), self.input_of(column, row))
        return (cell.made_by, cell.made_from) != now

    def stale(self, column: str) -> set[int]:
        return {key for key in self.rows if self.is_stale(column, key)}

    def suspect(self, column: str) -> set[int]:
        """The rows that may be computed again: stale ones, and those that were so meanwhile."""
        return {
            key
            for key, row in self.rows.items()
            if self.is_stale(column, key) or row.cells[column].disturbed
        }

    def compute(self, column: str, keys: set[int]) -> None:
        for key in keys:
            row = self.rows[key]
            value = self.input_of(column, row)
            made = compute(column, self.udfs[column], value)
            row.cells[column] = Cell(made, self.maker(column), value)
            self._note_disturbance(row)

    def clear(self, column: str) -> None:
        """Make another column of the same name, NULL everywhere."""
        for row in self.rows.values():
            row.cells[column] = Cell()
            self._note_disturbance(row)

    def expected(self) -> Iterator[dict[str, Any]]:
        for key, row in sorted(self.rows.items()):
            values = {name: cell.value for name, cell in row.cells.items()}
            yield {"k": key, self.input_name: row.x, "other": row.other, **values}
