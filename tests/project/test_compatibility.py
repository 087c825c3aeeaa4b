"""docs/compatibility.md: each line says works, differs or not here, and names a test that runs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if not line.startswith("| call |")
]


@cache
def known_tests(path: Path) -> set[str]:
    """The ids of a file's tests, without parameters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (n.name for n in node.body if isinstance(n, ast.FunctionDef))
            found.update(f"{node.name}::{name}" for name in inner)
    return found


def test_there_are_lines() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_line_has_a_test(row: list[str]) -> None:
    call, here, what, test = row
    assert call
    assert here in ("works", "differs", "not here")
    assert what or here == "works", "say what is different, or what to do instead"
    file, _, name = test.strip("`").partition("::")
    assert (ROOT / "tests" / file).exists()
    assert not name or name in known_tests(ROOT / "tests" / file)
