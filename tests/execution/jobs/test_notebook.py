"""What a notebook shows: small tables of escaped HTML, and bars that are updated in place."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import geneva
from geneva.config import Settings
from geneva.execution.jobs.notebook import NotebookBars
from geneva.execution.jobs.progress import JobProgress
from geneva.execution.runner import InProcessRunner
from geneva.render import html
from geneva.udf.policy import skip_on_error

if TYPE_CHECKING:
    from geneva.connection import Connection

STABLE = {"new_table_enable_stable_row_ids": "true"}
EVIL = "<script>alert('x')</script>"


@geneva.udf
def length(text: str) -> int:
    return len(text)


class Tags(HTMLParser):
    """Checks that every tag is closed in its turn, and keeps the words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag != "script"
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def shown(thing: Any) -> str:
    """The text that a browser would show of a thing."""
    tags = Tags()
    tags.feed(thing if type(thing) is str else thing._repr_html_())
    tags.close()
    assert tags.open == []
    return " | ".join(tags.words)


def test_everything_a_notebook_may_end_a_cell_with(local_db: Connection) -> None:
    rows = [{"id": i, "text": "ab"} for i in range(5)]
    table = local_db.create_table("t", rows, storage_options=STABLE)
    table.add_columns({"length": length})
    assert "rows to compute | 5 of 5" in shown(table.plan_backfill("length"))
    result = table.backfill("length")
    assert "status | DONE | rows computed | 5" in shown(result)
    assert f"Job {result} | status | DONE" in shown(local_db.get_job(result))
    assert "length | int64 | length(text)" in shown(table)
    condition = f"text <> '{EVIL.replace(chr(39), chr(39) * 2)}'"
    view = local_db.create_materialized_view("v", table.query().where(condition).select(["id"]))
    assert f"where | {condition}" in shown(view)
    assert "source | table 't' at version 3" in shown(view)
    assert "up to date | no" in shown(view.plan_refresh())
    view.refresh()
    assert "up to date | yes" in shown(view.plan_refresh())


def test_failed_rows_are_a_table(local_db: Connection) -> None:
    @geneva.udf(on_error=skip_on_error())
    def fails(text: str) -> int:
        raise ValueError(EVIL)

    table = local_db.create_table("t", [{"text": "a"}] * 60)
    table.add_columns({"fails": fails})
    assert "rows failed | 60" in shown(table.backfill("fails"))
    errors = table.get_errors()
    assert "60 failed rows" in shown(errors)
    assert "... and 10 older ones" in shown(errors)
    assert f"error | ValueError: {EVIL}" in shown(errors[0])


def test_markup_stays_text() -> None:
    assert EVIL in shown(html.section(EVIL, html.facts([(EVIL, EVIL)]), html.note(EVIL)))
    assert EVIL in shown(html.grid([EVIL], [[EVIL]]))
    assert EVIL in shown(html.bars(EVIL, [(EVIL, 1)], 2))


@pytest.mark.parametrize(
    ("done", "total", "percent"), [(0, 4, 0), (1, 4, 25), (9, 4, 100), (0, 0, 100)]
)
def test_a_bar_is_as_long_as_what_is_done(done: int, total: int, percent: int) -> None:
    assert f'aria-valuenow="{percent}"' in html.bars("t", [("committed", done)], total)


def test_bars_are_one_display_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    as_text: list[str] = []

    class Handle:
        def update(self, thing: Any) -> None:
            seen.append(shown(thing))
            as_text.append(repr(thing))

    def display(thing: Any, *, display_id: bool) -> Handle:
        assert display_id
        assert not seen
        seen.append(shown(thing))
        return Handle()

    fake = ModuleType("IPython.display")
    fake.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    with NotebookBars("length") as bars:
        with bars.phase("starting Spark"):
            assert "length: starting Spark" in seen.pop()
        for committed in range(5):
            bars(JobProgress(total=4, checkpointed=4, committed=committed))
    assert "committed | 0 / 4" in seen[0]
    assert "committed | 4 / 4" in seen[-1], "the end is shown, however soon it comes"
    assert len(seen) < 5, "a fast job does not flood the page"
    assert as_text[-1] == "length: checkpointed 4, ready to commit 0, committed 4 of 4 rows"


def test_a_terminal_says_what_the_bars_wait_for(
    local_db: Connection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen: list[str] = []

    def start() -> InProcessRunner:
        seen.append(capsys.readouterr().err)
        return InProcessRunner()

    settings = Settings(progress=True)
    db = geneva.connect(local_db.uri, runner=start, settings=settings)
    table = db.create_table("t", [{"text": "a"}])
    table.add_columns({"length": length})
    table.backfill("length")
    assert "length starting Spark" in seen[0], "while it starts"
    after = capsys.readouterr().err
    assert "length checkpointed" in after
    assert "starting Spark" not in after.split("1/1")[-1]


def test_a_job_in_a_kernel_draws_for_the_notebook(
    local_db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[JobProgress] = []
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(NotebookBars, "_draw", lambda self, progress: drawn.append(progress))
    table = geneva.connect(local_db.uri, runner=local_db._runner).create_table("t", [{"text": "a"}])
    table.add_columns({"length": length})
    table.backfill("length")
    assert drawn[-1].committed == 1


def test_in_a_real_kernel(tmp_path: Any) -> None:
    """Runs where nbclient and ipykernel are installed; they are not among the dependencies."""
    pytest.importorskip("ipykernel")
    notebook = pytest.importorskip("nbformat").v4
    cells = (
        f"import geneva\nfrom geneva.execution.runner import InProcessRunner\n"
        f"db = geneva.connect({str(tmp_path / 'db')!r}, runner=InProcessRunner)\n"
        "table = db.create_table('t', [{'text': 'abc'}] * 50)\n"
        "length = geneva.udf(lambda text: len(text), data_type=__import__('pyarrow').int64())\n"
        "table.add_columns({'length': length})",
        "table.plan_backfill('length')",
        "table.backfill('length')",
        "table",
    )
    page = notebook.new_notebook(cells=[notebook.new_code_cell(cell) for cell in cells])
    pytest.importorskip("nbclient").NotebookClient(page, timeout=120).execute()
    outputs = [[o.get("data", {}).get("text/html", "") for o in c.outputs] for c in page.cells]
    assert "rows to compute" in outputs[1][0]
    assert "committed | 50 / 50" in shown(str(outputs[2][0])), "the bars, at their end"
    assert "rows computed | 50" in shown(str(outputs[2][1]))
    assert "lambda(text)" in outputs[3][0]
