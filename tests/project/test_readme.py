"""The examples of the README and of the guides run as they are printed, without Spark."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import geneva
from geneva.execution.runner import InProcessRunner

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)[^)]*\)")
PLACE = re.compile(
    r'connect\("([^"]+)"|(?:create_(?:table|materialized_view|udtf_view)\(|view_name=)\s*"([^"]+)"'
)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, *, slow: bool = False) -> list[str]:
    """The Python of a page, except what says `notest` (it needs a cluster), or `slow`."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    left_out = ("notest",) if slow else ("notest", "slow")
    return [code for info, code in found if not any(word in info for word in left_out)]


def run(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool = False
) -> dict[str, Any]:
    """Run a page's blocks one after the other, in a folder of their own."""
    monkeypatch.chdir(folder)
    in_process = functools.partial(geneva.connect, runner=InProcessRunner)
    monkeypatch.setattr(geneva, "connect", in_process)
    names: dict[str, Any] = {"__name__": "example"}
    for code in blocks(page, slow=slow):
        exec(compile(code, page.name, "exec"), names)
    return names


def test_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(ROOT / "README.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "compute    1 of 3 rows in 1 fragment; 1 fragment skipped" in printed
    assert "\n1\nDONE\n" in printed
    table = names["table"]
    assert [len(vector) for vector in table.to_arrow()["embedding"].to_pylist()] == [4, 4, 4]
    jobs = names["db"].list_jobs("texts")
    assert [job.metrics["udf_rows"] for job in jobs] == [3, 2, 0, 1, 2]
    assert printed.endswith("1\n"), "the refresh after one append computes one row"


def test_the_guide_to_udfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "udfs.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "because    UDF changed: 2 rows" in printed
    assert "  global SEEN: dict (filled by calls: by type, without its contents)\n" in printed
    shown = (ROOT / "docs" / "udfs.md").read_text(encoding="utf-8")
    version = re.search("version ([0-9a-f]{32}) of 'logarithm'", printed)
    assert version is not None
    assert version[0] in shown, "the page shows what is printed"


@pytest.mark.slow
def test_the_large_examples_of_the_guide_to_udfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run(ROOT / "docs" / "udfs.md", tmp_path, monkeypatch, slow=True)
    assert names["film"].size() == 200_000_000


def test_the_guide_to_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(ROOT / "docs" / "views.md", tmp_path, monkeypatch)
    assert names["db"].list_materialized_views() == ["english", "of_the_copy", "passages"]


def test_the_guide_to_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "loading.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert "DONE: 2 rows loaded, 1 not in the source in " in printed
    assert "Several rows of the rows given have the same 'id': 1. " in printed


def test_the_guide_to_table_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(ROOT / "docs" / "udtf.md", tmp_path, monkeypatch)
    assert names["best"].to_arrow().sort_by("id")["id"].to_pylist() == [2, 5]


def test_the_guide_to_branches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "branches.md", tmp_path, monkeypatch)
    assert "while version 2 is checked out" in capsys.readouterr().out


def test_the_guide_to_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "failures.md", tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["DONE 1", "1"]
    assert "2 ValueError could not convert string to float: 'n/a' price='n/a'" in lines
    at = lines.index("TimeoutError")
    assert lines[at - 5 : at] == ["1", "0", "1", "1", "1"]


def test_the_guide_to_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "services.md", tmp_path, monkeypatch)
    assert capsys.readouterr().out.split() == ["0.25", "25", "3", "15"]


@pytest.mark.spark
@pytest.mark.slow
def test_the_guide_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROOT / "docs" / "spark.md", tmp_path, monkeypatch, slow=True)
    assert "|  2|bonjour|" in capsys.readouterr().out


def test_the_pages_can_be_tried_in_one_folder() -> None:
    made: dict[tuple[str, str], str] = {}
    for page in PAGES:
        folder = ""
        for code in blocks(page, slow=True):
            for connected, created in PLACE.findall(code):
                folder = connected.removeprefix("./") or folder
                if created:
                    table = (folder, created)
                    assert made.setdefault(table, page.name) == page.name, f"{table} is there"
    assert {
        ("my-database", "texts"),
        ("my-database", "articles"),
        ("shop", "reviews"),
    } <= made.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_ten_lines_are_few() -> None:
    code = [line for line in blocks(ROOT / "README.md")[0].splitlines() if line.strip()]
    assert len(code) <= 12
