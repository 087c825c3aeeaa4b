"""What histories of views share: shapes of views, UDFs that note their calls, and the allowance.

The allowance is how often a refresh may call a UDF: for rows that are new in the view, and for rows
whose inputs or whose function are others than those that the committed value was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lance
import pyarrow as pa

from geneva import UDF, Connection, Table, chunker, udf
from geneva.query import Query
from geneva.storage.lance.dataset import quote_path
from geneva.udf.chunker import Chunker
from geneva.view import MaterializedView

CALLS: list[tuple[str, tuple[Any, ...]]] = []
"""Every call of a UDF in this process: the column, and the inputs it was called with."""

CHUNKS = "__chunks"
SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("x", pa.int64()),
        ("y", pa.int64()),
        ("s", pa.string()),
        ("p", pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ("flag", pa.int64()),
        ("other", pa.int64()),
    ]
)


def made_of(column: str, number: int, values: tuple[Any, ...]) -> int | None:
    """Compute a cell: different for every column, UDF and input, except that some are NULL."""
    if any(value is None for value in values):
        return -number
    total = sum(value * 31**i for i, value in enumerate(values))
    return None if total % 5 == 3 else total * 100 + number + len(column)


def one_input(column: str, number: int) -> UDF:
    """Make version `number` of a column's UDF of one input."""

    def function(value: int | None) -> int | None:
        from view_model import CALLS, made_of

        CALLS.append((column, (value,)))
        return made_of(column, number, (value,))

    return udf(function, data_type=pa.int64(), version=f"{column}-{number}")


def two_inputs(column: str, number: int) -> UDF:
    """Make version `number` of a column's UDF of two inputs."""

    def function(first: int | None, second: int | None) -> int | None:
        from view_model import CALLS, made_of

        CALLS.append((column, (first, second)))
        return made_of(column, number, (first, second))

    return udf(function, data_type=pa.int64(), version=f"{column}-{number}")


def splitter(number: int) -> Chunker:
    """Make version `number` of a chunker: none to three rows of one."""

    def pieces(value: int | None) -> Iterator[tuple[int, str]]:
        from view_model import CALLS

        CALLS.append(("__chunks", (value,)))
        for part in range((value or 0) % 4):
            yield part, f"{value}/{part}/{number}"

    return chunker(
        pieces,
        output_schema=pa.schema([("part", pa.int64()), ("text", pa.string())]),
        version=f"chunks-{number}",
    )


@dataclass(frozen=True)
class Shape:
    """A kind of view: its query over its source, and what its UDFs read."""

    query: Callable[[Table, dict[str, int]], Query]
    udfs: dict[str, tuple[str, ...]]
    altered: str | None = None
    """The column whose UDF is altered."""
    alter: Callable[[int], Any] | None = None
    over: str = "src"


def _columns(source: Table, number: dict[str, int]) -> Query:
    return (
        source.query()
        .where("flag < 5")
        .select(
            {
                "k": "k",
                "name": "s",
                "b": "p.b",
                "sum": "x + y",
                "f": (one_input("f", number["f"]), ["x"]),
                "g": (two_inputs("g", 0), ["y", "d"]),
            }
        )
    )


def _whole(source: Table, number: dict[str, int]) -> Query:
    return source.query().add_column({"f": (two_inputs("f", number["f"]), ["x", "p.a"])})


def _shuffled(source: Table, number: dict[str, int]) -> Query:
    f = (one_input("f", number["f"]), ["d"])
    return source.query().where("flag < 7").select({"k": "k", "f": f}).shuffle(3).limit(4)


def _bounded(source: Table, number: dict[str, int]) -> Query:
    f = (one_input("f", number["f"]), ["x"])
    query = source.query().where("flag < 7").select({"k": "k", "s": "s", "f": f})
    return query.offset(2).limit(3)


def _chained(source: Table, number: dict[str, int]) -> Query:
    g = (one_input("top", number["g"]), ["f"])
    return source.query().where("f IS NOT NULL").select({"k": "k", "name": "name", "g": g})


def _chunked(source: Table, number: dict[str, int]) -> Query:
    query = source.query().where("flag < 5").select(["k", "s"])
    return query.add_column((splitter(number["chunks"]), ["x"]))


def _chunked_twice(source: Table, number: dict[str, int]) -> Query:
    f = (one_input("f", number["f"]), ["y"])
    query = source.query().select({"k": "k", "f": f}).limit(5)
    return query.add_column((splitter(0), ["x"]))


SHAPES: dict[str, dict[str, Shape]] = {
    "columns": {
        "v": Shape(_columns, {"f": ("x",), "g": ("y", "d")}, "f", lambda n: one_input("f", n))
    },
    "whole": {"v": Shape(_whole, {"f": ("x", "p.a")}, "f", lambda n: two_inputs("f", n))},
    "shuffled": {"v": Shape(_shuffled, {"f": ("d",)}, "f", lambda n: one_input("f", n))},
    "bounded": {"v": Shape(_bounded, {"f": ("x",)}, "f", lambda n: one_input("f", n))},
    "chained": {
        "v": Shape(_columns, {"f": ("x",), "g": ("y", "d")}, "f", lambda n: one_input("f", n)),
        "top": Shape(_chained, {"g": ("f",)}, "g", lambda n: one_input("top", n), over="v"),
    },
    "chunked": {"v": Shape(_chunked, {CHUNKS: ("x",)}, "pieces", splitter)},
    "chunked and computed": {
        "v": Shape(_chunked_twice, {CHUNKS: ("x",), "f": ("y",)}, "f", lambda n: one_input("f", n))
    },
}


def rows_as_set(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


Made = tuple[str, tuple[Any, ...]]
"""The UDF and the inputs that a value was made of."""


@dataclass
class Tracked:
    """A view, and what its committed values were made of."""

    name: str
    shape: Shape
    view: MaterializedView
    numbers: dict[str, int]
    made: dict[str, dict[int, Made]] = field(default_factory=dict)
    """Per UDF column and source row: what the committed value was made of."""
    before: dict[str, dict[int, Made]] = field(default_factory=dict)
    """The same when the last refresh ended that was not cut off."""

    @property
    def data_uri(self) -> str:
        """Where the UDF columns are: for a chunked view in its hidden one."""
        uri = self.view.ref.uri
        return f"{uri}/_chunks" if CHUNKS in self.shape.udfs else uri

    def label(self, column: str) -> str:
        """The name under which a column's calls are noted."""
        return "top" if self.name == "top" else column

    def maker(self, column: str) -> str:
        number = self.numbers["chunks" if column == CHUNKS else column]
        return f"{column}-{number}"

    def wanted(self, source: lance.LanceDataset) -> dict[str, dict[int, Made]]:
        """What every value of the view, whose rows are right, is to be made of."""
        ids = self.source_ids()
        found: dict[str, dict[int, Made]] = {}
        for column, inputs in self.shape.udfs.items():
            paths = {f"c{i}": quote_path(path, source.schema) for i, path in enumerate(inputs)}
            table = source._take_rows(sorted(ids), {**paths, "id": "_rowid"})
            values = zip(*(table.column(name).to_pylist() for name in paths), strict=True)
            rows = zip(table.column("id").to_pylist(), values, strict=True)
            found[column] = {i: (self.maker(column), inputs) for i, inputs in rows}
            assert found[column].keys() == ids, "the view has rows that its source has not"
        return found

    def source_ids(self) -> set[int]:
        table = lance.dataset(self.data_uri).to_table(columns=["__source_row_id"])
        ids = table.column(0).to_pylist()
        assert len(set(ids)) == len(ids), "a row is in the view twice"
        return set(ids)

    def files(self, column: str) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Per source row: its fragment, and the files that the column is in."""
        dataset = lance.dataset(self.data_uri)
        fields = _leaves(next(f for f in dataset.lance_schema.fields() if f.name() == column))
        files = {
            fragment.fragment_id: tuple(
                file.path for file in fragment.data_files() if fields & set(file.fields)
            )
            for fragment in dataset.get_fragments()
        }
        table = dataset.scanner(columns=["__source_row_id"], with_row_address=True).to_table()
        owners = [address >> 32 for address in table.column("_rowaddr").to_pylist()]
        ids = table.column("__source_row_id").to_pylist()
        return {i: (owner, files[owner]) for i, owner in zip(ids, owners, strict=True)}


def _leaves(node: Any) -> set[int]:
    children = node.children()
    return set().union(*map(_leaves, children)) if children else {node.id()}


def create(db: Connection, name: str, shape: Shape) -> Tracked:
    numbers = Counter[str]()
    query = shape.query(db.open_table(shape.over), numbers)
    view = db.create_materialized_view(name, query)
    return Tracked(name, shape, view, dict.fromkeys(("f", "g", "chunks"), 0))
