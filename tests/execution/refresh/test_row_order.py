"""Where the rows of a view are: the size of its fragments, and the order of shuffled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from geneva import Connection, Table, chunker
from geneva.execution.refresh import run as refresh
from geneva.planning.membership import choose_rows
from support import Calls, tripled
from view_support import fragment_rows, make_source, numbers


def shuffled(source: Table, seed: int, where: str | None = None) -> list[int]:
    """The ids of the source's rows, in the order of a shuffle."""
    rows = source.to_lance().to_table(columns=["id"], filter=where, with_row_id=True)
    ids = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    order = choose_rows(
        np.sort(np.array(list(ids), dtype=np.uint64)), shuffle_seed=seed, offset=None, limit=None
    )
    return [ids[i] for i in order.tolist()]


def order_of(view: Table) -> list[Any]:
    return list(view.to_arrow()["id"].to_pylist())


class TestTheFirstRefresh:
    @pytest.mark.parametrize("seed", [None, 7])
    def test_fragments_are_as_large_as_asked(
        self, local_db: Connection, calls: Calls, seed: int | None
    ) -> None:
        source = make_source(local_db, rows=10)
        query = source.query().add_column({"t": tripled(calls)})
        query = query.shuffle(seed) if seed is not None else query
        view = local_db.create_materialized_view("v", query)
        view.refresh(max_rows_per_fragment=4)
        assert fragment_rows(view) == [4, 4, 2]
        assert order_of(view) == (shuffled(source, seed) if seed is not None else list(range(10)))
        assert calls.taken() == list(range(10))
        assert view.refresh(max_rows_per_fragment=2).rows_computed == 0
        source.add(numbers(10, 13))
        view.refresh(max_rows_per_fragment=2)
        assert fragment_rows(view) == [4, 4, 2, 2, 1]
        assert calls.taken() == [10, 11, 12]

    def test_a_larger_size_changes_nothing(self, local_db: Connection, calls: Calls) -> None:
        view = local_db.create_materialized_view("v", make_source(local_db, rows=10))
        view.refresh(max_rows_per_fragment=10)
        assert fragment_rows(view) == [10]

    def test_cut_off_between_its_two_commits(
        self, local_db: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = make_source(local_db, rows=10)
        view = local_db.create_materialized_view("v", source.query().shuffle(3))

        def dying(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(refresh, "append_placeholders", dying)
            with pytest.raises(KeyboardInterrupt):
                view.refresh(max_rows_per_fragment=4)
        view.refresh(max_rows_per_fragment=4)
        assert fragment_rows(view) == [4, 4, 2]
        assert order_of(view) == shuffled(source, 3)

    def test_of_chunks(self, local_db: Connection) -> None:
        @chunker(output_schema=pa.schema([("letter", pa.string())]))
        def letters(name: str) -> Any:
            return [(letter,) for letter in name]

        source = make_source(local_db, rows=5)
        view = local_db.create_udtf_view("v", source.query().select(["id"]), letters)
        view.refresh(max_rows_per_fragment=4)
        assert fragment_rows(view) == [4, 4, 2]
        assert view.to_arrow()["letter"].to_pylist() == [c for i in range(5) for c in f"n{i}"]


class TestShuffled:
    def test_rows_that_come_before_the_first_refresh_are_mixed_in(
        self, local_db: Connection
    ) -> None:
        source = make_source(local_db, rows=10)
        view = local_db.create_materialized_view("v", source.query().shuffle(5))
        source.add(numbers(10, 20))
        source.delete("id = 3")
        view.refresh()
        assert order_of(view) == shuffled(source, 5)

    def test_later_ones_stand_behind_in_the_same_order(self, local_db: Connection) -> None:
        source = make_source(local_db, rows=10)
        view = local_db.create_materialized_view("v", source.query().shuffle(5))
        view.refresh()
        first = order_of(view)
        source.add(numbers(10, 20))
        view.refresh()
        assert order_of(view) == [*first, *shuffled(source, 5, "id >= 10")]

    def test_a_sample_is_the_same_however_it_came_to_be(self, local_db: Connection) -> None:
        source = make_source(local_db, rows=10)
        query = source.query().shuffle(5).offset(1).limit(6)
        view = local_db.create_materialized_view("v", query)
        view.refresh()
        for start in (10, 20):
            source.add(numbers(start, start + 10))
            source.delete(f"id % 10 = {start // 10}")
            view.refresh()
            assert sorted(order_of(view)) == sorted(shuffled(source, 5)[1:7])
