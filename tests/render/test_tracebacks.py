"""What a notebook shows of an error: the user's lines, and none of ours."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import pyarrow as pa
import pytest

from geneva import UDF, udf
from geneva.errors import UDFExecutionError, UserInputError
from geneva.execution.runner import InProcessRunner
from support import connect


def helper(x: int) -> int:
    return 10 // x


@udf
def divided(x: int) -> int:
    return helper(x)


def failed(tmp_path: Path, function: UDF) -> UDFExecutionError:
    table = connect(tmp_path / "db", InProcessRunner).create_table("t", pa.table({"x": [1, 0]}))
    table.add_columns({"c": function})
    with pytest.raises(UDFExecutionError) as caught:
        table.backfill("c")
    return caught.value


def test_a_notebook_shows_the_users_lines_and_none_of_ours(tmp_path: Path) -> None:
    error = failed(tmp_path, divided)
    shown = error._render_traceback_()
    text = "\n".join(shown)
    for own in ('table.backfill("c")', "return helper(x)", "return 10 // x", "ZeroDivisionError"):
        assert own in text
    assert "src/geneva" not in text
    assert len(shown) < 25
    assert "row 1" in text
    assert "column 'c'" in text


def test_a_script_shows_few_of_our_lines_and_all_are_kept(tmp_path: Path) -> None:
    error = failed(tmp_path, divided)
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "src/geneva" in f.filename]
    assert len(ours) <= 2
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.job_id, again.internals) == (str(error), error.job_id, None)
    kept = traceback.extract_tb(error.internals)
    assert any("driver.py" in frame.filename for frame in kept)


def test_text_of_strangers_acts_on_no_notebook(tmp_path: Path) -> None:
    @udf
    def hostile(x: int) -> int:
        raise ValueError("\x1b]0;owned\x07\u202e")

    text = "\n".join(failed(tmp_path, hostile)._render_traceback_())
    assert "\\x1b]0;owned\\x07\\u202e" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_other_errors_too() -> None:
    try:
        raise UserInputError("wrong")
    except UserInputError as error:
        shown = error._render_traceback_()
    assert shown[-1] == "UserInputError: wrong"
    assert any("test_tracebacks.py" in line for line in shown)
