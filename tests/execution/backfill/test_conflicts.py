"""The conflict matrix: every operation, at every moment of a backfill, with and without stable ids.

Run with GENEVA_WRITE_DOCS=1 and -m '' to write what was seen to docs/conflicts.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import conflict_watch
import geneva
from geneva import udf
from geneva.errors import ColumnChangedError, TableChangedError
from geneva.execution.backfill.committer import TableCommitter, publish_columns
from geneva.execution.runner import InProcessRunner
from support import Prototypes

ROWS, FRAGMENTS = 60, 6
MOMENTS = ("before plan", "while applying", "between stage and commit", "between two commits")


@udf(data_type=pa.int64(), version="double-1")
def double(x: int) -> int | None:
    import conflict_watch

    conflict_watch.watch.saw(x)
    return None if x % 10 == 7 else 2 * x


@udf(data_type=pa.int64(), version="plus-1")
def plus(y: int) -> int:
    return y + 1


def expected(x: int) -> int | None:
    return None if x % 10 == 7 else 2 * x


def six_fragments(db: geneva.Connection, _: Prototypes, stable: bool) -> None:
    options = {"new_table_enable_stable_row_ids": str(stable).lower()}
    step = ROWS // FRAGMENTS
    rows = [{"k": i, "x": i, "y": i, "other": "a"} for i in range(ROWS)]
    table = db.create_table("t", pa.Table.from_pylist(rows[:step]), storage_options=options)
    for start in range(step, ROWS, step):
        table.add(pa.Table.from_pylist(rows[start : start + step]))
    table.add_columns({"c": double, "p": plus})


def copied_table(prototypes: Prototypes, folder: Path, *, stable: bool) -> geneva.Table:
    """The table of six fragments, where one task after the other runs."""
    prototypes.copy(six_fragments, folder / "db", stable)
    return geneva.connect(folder / "db", runner=lambda: InProcessRunner(1)).open_table("t")


def append(table: geneva.Table) -> None:
    """Adds 3 rows."""
    table.add(pa.Table.from_pylist([{"k": 1000 + i, "x": 1000 + i, "y": 0} for i in range(3)]))


def insert_only_merge(table: geneva.Table) -> None:
    """`merge_insert` of 1 new row."""
    new = pa.Table.from_pylist([{"k": 2000, "x": 2000, "y": 1, "other": "m"}])
    table.merge_insert("k").when_not_matched_insert_all().execute(new)


def delete(table: geneva.Table) -> None:
    """Deletes 4 rows, of three fragments."""
    table.delete("k in (3, 13, 14, 59)")


def delete_fragment(table: geneva.Table) -> None:
    """Deletes the 10 rows of a fragment."""
    table.delete("k >= 20 and k < 30")


def update_other(table: geneva.Table) -> None:
    """Updates a column that is no input, in 2 rows."""
    table.update(where="k in (5, 25)", values={"other": "z"})


def update_input(table: geneva.Table) -> None:
    """Updates the input, in 2 rows."""
    table.update(where="k in (6, 36)", values={"x": 5001})


def upsert(table: geneva.Table) -> None:
    """`merge_insert` of 3 rows: one with its old input, one with another, one new."""
    new = pa.Table.from_pylist(
        [
            {"k": 8, "x": 8, "y": 8, "other": "u"},
            {"k": 9, "x": 7001, "y": 9, "other": "u"},
            {"k": 3000, "x": 3000, "y": 0, "other": "u"},
        ]
    )
    table.merge_insert("k").when_matched_update_all().when_not_matched_insert_all().execute(new)


def compact(table: geneva.Table) -> None:
    """Compacts the table."""
    table.compact_files()


def delete_and_compact(table: geneva.Table) -> None:
    """Deletes 4 rows, and compacts."""
    table.delete("k in (3, 13, 14, 59)")
    table.compact_files()


def compact_twice(table: geneva.Table) -> None:
    """Compacts, adds 3 rows, deletes 1, compacts again."""
    table.compact_files()
    append(table)
    table.delete("k = 31")
    table.compact_files()


def add_plain_column(table: geneva.Table) -> None:
    """Adds a column of SQL."""
    table.checkout_latest()
    table.add_columns({"z": "x + 1"})


def drop_other_column(table: geneva.Table) -> None:
    """Drops a column that is no input."""
    table.drop_columns(["other"])


def build_index(table: geneva.Table) -> None:
    """Builds an index on the computed column."""
    lance.dataset(table.ref.uri).create_scalar_index("c", "BTREE")


def other_backfill(table: geneva.Table) -> None:
    """Backfills another column."""
    table._connection.open_table("t").backfill("p")


def same_backfill(table: geneva.Table) -> None:
    table._connection.open_table("t").backfill("c")


OPERATIONS = (
    append,
    insert_only_merge,
    delete,
    delete_fragment,
    update_other,
    update_input,
    upsert,
    compact,
    delete_and_compact,
    compact_twice,
    add_plain_column,
    drop_other_column,
    build_index,
    other_backfill,
)

# Rows that must be computed beyond the first plan's: (appended or inserted, input changed).
EXTRA = {
    "append": 3,
    "insert_only_merge": 1,
    "update_input": 2,
    "upsert": 2,
    "compact_twice": 3,
}
GONE = {"delete": 4, "delete_fragment": 10, "delete_and_compact": 4, "compact_twice": 1}
OUTCOMES: dict[tuple[str, str, bool], str] = {}


def matrix() -> list[Any]:
    """All of it. Each operation at each moment of a job is quick on one kind of table, by turns."""
    cells = [(operation, moment) for operation in OPERATIONS for moment in MOMENTS]
    return [
        pytest.param(
            operation,
            moment,
            stable,
            id=f"{operation.__name__}-{moment}-{'stable-ids' if stable else 'addresses'}",
            marks=[pytest.mark.slow] if is_slow else [],
        )
        for number, (operation, moment) in enumerate(cells)
        for stable in (False, True)
        for is_twin in [stable == bool((number + number // len(MOMENTS)) % 2)]
        for is_slow in [is_twin or moment == "before plan"]
    ]


@pytest.mark.parametrize(("operation", "moment", "stable"), matrix())
def test_an_operation_at_any_moment_costs_only_what_it_changed(
    tmp_path: Path,
    prototypes: Prototypes,
    operation: Callable[[geneva.Table], None],
    moment: str,
    stable: bool,
) -> None:
    conflict_watch.watch = watch = conflict_watch.Watch()
    table = copied_table(prototypes, tmp_path, stable=stable)
    db = table._connection
    other = db.open_table("t")
    put_at_moment(db, moment, lambda: operation(other))

    result = table.backfill("c", commit_granularity=2)

    assert watch.action is None, "the operation never happened"
    table.checkout_latest()
    rows = table.to_arrow().to_pylist()
    assert [row["c"] for row in rows] == [expected(row["x"]) for row in rows]
    name = operation.__name__
    extra, gone = EXTRA.get(name, 0), GONE.get(name, 0)
    if moment == "before plan":
        replaced = {"update_input": 2, "upsert": 1}.get(name, 0)
        assert len(watch.calls) == ROWS - gone + extra - replaced
    else:
        assert ROWS - gone <= len(watch.calls) <= ROWS + extra
    OUTCOMES[name, moment, stable] = f"{result.status}, {len(watch.calls)}"
    assert db.get_job(result).status == "DONE"
    watch.calls.clear()
    table.backfill("c")
    assert watch.calls == []
    lance.dataset(table.ref.uri).validate()


def put_at_moment(db: geneva.Connection, moment: str, action: Callable[[], None]) -> None:
    """Arrange for `action` to run exactly then."""
    watch = conflict_watch.watch
    watch.action = action
    commits = [0]

    def commit(*args: Any) -> Any:
        if moment == "between stage and commit":
            watch.fire()
        outcome = publish_columns(*args)
        commits[0] += 1
        if moment == "between two commits" and commits[0] == 1:
            watch.fire()
        return outcome

    db._make_committer = partial(TableCommitter, publish=commit)
    if moment == "before plan":
        watch.fire()
    if moment == "while applying":
        watch.at = 25


def drop_column(table: geneva.Table) -> None:
    table.drop_columns(["c"])


def replace_column(table: geneva.Table) -> None:
    table.drop_columns(["c"])
    table.add_columns({"c": double})


def overwrite(table: geneva.Table) -> None:
    table._connection.create_table("t", pa.table({"x": [1]}), mode="overwrite")


@pytest.mark.parametrize("moment", MOMENTS[1:3])
@pytest.mark.parametrize("operation", [drop_column, replace_column, overwrite])
def test_what_cannot_be_saved_fails_with_a_typed_error(
    tmp_path: Path,
    prototypes: Prototypes,
    operation: Callable[[geneva.Table], None],
    moment: str,
) -> None:
    conflict_watch.watch = conflict_watch.Watch()
    table = copied_table(prototypes, tmp_path, stable=False)
    db = table._connection
    other = db.open_table("t")
    put_at_moment(db, moment, lambda: operation(other))
    with pytest.raises((ColumnChangedError, TableChangedError), match="'t'"):
        table.backfill("c")
    assert db.list_jobs()[0].status == "FAILED"


@pytest.fixture(scope="module", autouse=True)
def _matrix() -> object:
    yield
    if os.environ.get("GENEVA_WRITE_DOCS") and OUTCOMES:
        write_matrix(Path(__file__).parents[3] / "docs" / "conflicts.md")


def write_matrix(path: Path) -> None:
    lines = [
        "# What other writers do to a running backfill",
        "",
        f"Each cell is a test: a backfill of a column of {ROWS} rows in {FRAGMENTS} fragments, two "
        "fragments a commit. While it runs, another handle of the table does what the row says, "
        "exactly at the moment that the column names. The cell has the end of the backfill's job "
        "and the number of rows that its function was called for: first in a table without stable "
        "row ids, then in one with them. Afterwards every value is right, and another backfill "
        "calls nothing.",
        "",
        f"More than {ROWS} calls are for rows that came, or whose input changed; fewer for rows "
        "that were deleted before they were computed. The moments: before the job makes its "
        "plan; while the function runs; after column files were written and before their "
        "commit; after the first commit and before the second.",
        "",
        "The table is made by `GENEVA_WRITE_DOCS=1 pytest -m '' -k conflicts`.",
        "",
        "| operation | what it does | " + " | ".join(MOMENTS) + " |",
        "|---" * (len(MOMENTS) + 2) + "|",
    ]
    for operation in OPERATIONS:
        cells = []
        for moment in MOMENTS:
            plain = OUTCOMES.get((operation.__name__, moment, False), "-")
            stable = OUTCOMES.get((operation.__name__, moment, True), "-").split(", ")[-1]
            cells.append(f"{plain} / {stable}")
        name, what = operation.__name__.replace("_", " "), str(operation.__doc__).rstrip(".")
        lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")
