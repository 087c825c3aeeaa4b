"""One stateful function behind several columns: set up once for all, and closed with the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import geneva
from geneva import Table
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker import program


@geneva.udf(data_type=pa.int64())
class Adds:
    def __init__(self, number: int, log: str) -> None:
        self.number, self.log = number, log

    def setup(self) -> None:
        self.is_open = True
        self._note("setup")

    def close(self) -> None:
        self.is_open = False
        self._note("close")

    def _note(self, what: str) -> None:
        with Path(self.log).open("a") as log:
            log.write(f"{what} {self.number}\n")

    def __call__(self, x: pa.Array) -> pa.Array:
        assert self.is_open, "called after close()"
        return pc.add(x, self.number)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    program.close_programs()
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    yield db.create_table("t", pa.table({"x": range(10)}))
    program.close_programs()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_a_model_is_set_up_once_for_any_number_of_columns(table: Table, log: Path) -> None:
    columns = [f"c{i}" for i in range(2 * program._MAX_LIVE)]
    for column in columns:
        table.add_columns({column: Adds(1, str(log))})
        table.backfill(column)
    assert log.read_text() == "setup 1\n"
    assert table.to_arrow()[columns[-1]].to_pylist() == list(range(1, 11))
    program.close_programs()
    assert log.read_text() == "setup 1\nclose 1\n"


def test_a_model_that_others_have_displaced_is_closed_and_set_up_anew(
    table: Table, log: Path
) -> None:
    others = [f"c{i}" for i in range(program._MAX_LIVE)]
    for column in ("a", "b"):
        table.add_columns({column: Adds(1, str(log))})
    for number, column in enumerate(others, 10):
        table.add_columns({column: Adds(number, str(log))})
    for column in ("a", "b", *others[:-1]):  # the first program goes, its model stays
        table.backfill(column)
    assert "close" not in log.read_text()
    table.backfill(others[-1])  # the second one goes, too
    assert log.read_text().split("\n").count("close 1") == 1
    table.add(pa.table({"x": range(10, 20)}))
    table.backfill("b")
    assert sorted(table.to_arrow()["b"].to_pylist()) == list(range(1, 21))
    assert log.read_text().split("\n").count("setup 1") == 2


@geneva.udf(data_type=pa.int64())
class NeverCloses:
    def close(self) -> None:
        raise OSError("gone")

    def __call__(self, x: pa.Array) -> pa.Array:
        return x


def test_a_model_that_can_not_be_closed_is_no_fault_of_the_job_that_displaces_it(
    table: Table, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.add_columns({"never": NeverCloses()})
    table.backfill("never")
    for number in range(program._MAX_LIVE):
        table.add_columns({f"c{number}": Adds(number, str(log))})
        assert table.backfill(f"c{number}").status == "DONE"
    assert "A function could not be closed" in caplog.messages
