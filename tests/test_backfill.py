"""What a backfill computes, how often it calls the function for it, and what each parameter does."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support import Calls, by_id, counted, make_table, tripled

from geneva import Connection, JobStatus


class TestEveryRowOnce:
    def test_all_rows_of_all_fragments(self, db: Connection, calls: Calls) -> None:
        table = make_table(db, [5, 1, 7])
        table.add_columns({"x": tripled(calls)})
        assert set(by_id(table, "x").values()) == {None}
        result = table.backfill("x")
        assert by_id(table, "x") == {i: 3 * i for i in range(13)}
        assert calls.rows == list(range(13))
        assert (result.status, result.rows_computed, result.rows_committed) == (
            JobStatus.DONE,
            13,
            13,
        )
