"""What docs/cli.md shows is what the commands print. GENEVA_WRITE_DOCS=1 writes it anew."""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import geneva
from command_line import invoke
from geneva.config import Settings
from geneva.execution.runner import InProcessRunner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHANGING = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}"), "ID"),
    (re.compile(r"\b(?=\w*\d)[0-9a-f]{8,32}\b|\b[a-f]{8}\b"), "ID"),
    (re.compile(r"\(/[^)]*\)"), "(PATH)"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "TIME"),
    (re.compile(r"\d+(\.\d+)+"), "NUMBER"),
    (re.compile(r"─+"), "-"),
    (re.compile(r"[ \t]+"), " "),
)


def steady(text: str) -> str:
    """A text without what differs from run to run: ids, times, versions, widths."""
    for pattern, stands_for in CHANGING:
        text = pattern.sub(stands_for, text)
    return text


def printed(block: str) -> str:
    """The commands of a block with what they print now."""
    parts = []
    for line in block.splitlines():
        if line.startswith("$ "):
            name, *arguments = shlex.split(line.removeprefix("$ "))
            assert name == "geneva"
            result = invoke(arguments, catch_exceptions=False)
            parts.append(f"{line}\n{result.output.rstrip()}\n")
    return "\n".join(parts)


def renewed(page: str) -> str:
    """The page with every output as it is now."""

    def block(found: re.Match[str]) -> str:
        kind, info, body = found.groups()
        if kind == "console":
            body = printed(body)
        elif "file=" in info:
            Path(info.partition("file=")[2]).write_text(body)
        elif kind == "python":
            exec(compile(body, PAGE.name, "exec"), {"__name__": "example"})
        return f"```{kind}{info}\n{body}```"

    return BLOCK.sub(block, page)


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Settings(jvm_archive=False, progress=False)
    in_process = functools.partial(geneva.connect, runner=InProcessRunner, settings=quiet)
    monkeypatch.setattr(geneva, "connect", in_process)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = PAGE.read_text(encoding="utf-8")
    try:
        now = renewed(page)
    finally:
        sys.modules.pop("functions", None)
    if os.environ.get("GENEVA_WRITE_DOCS"):
        PAGE.write_text(now, encoding="utf-8")
        return
    assert steady(now) == steady(page), "run GENEVA_WRITE_DOCS=1 pytest tests/cli/test_docs.py"
