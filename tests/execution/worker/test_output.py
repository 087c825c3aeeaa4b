"""What a task prints is kept: all of it that counts, never more than fits, whoever printed it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geneva.errors import JobCancelledError
from geneva.execution.jobs import output as keeping
from geneva.execution.jobs.output import OutputKeeper
from geneva.execution.worker import live_output
from geneva.execution.worker import output as writing
from geneva.execution.worker.output import (
    MAX_OUTPUT_BYTES,
    LostOutput,
    captured,
    lost_output,
    output_folder,
)
from geneva.model.tables import Secrets
from geneva.storage.jobs.output import OutputStore


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(writing, "_place", None)  # where an embedded Spark of other tests keeps it
    return tmp_path


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_whoever_prints_is_heard(own_folder: Path):
    with captured("job", "0-0") as output:
        os.write(1, b"C code\n")
        os.write(2, b"C code that complains\n")
        subprocess.run(["/bin/sh", "-c", "echo a child"], check=True)
        text = output()
    assert text == "C code\nC code that complains\na child\n"
    assert not left_in(own_folder)


def test_python_prints_and_logs_and_warns(own_folder: Path):
    """In a process of its own: pytest has streams of its own."""
    script = f"""
        import logging, sys, tempfile, warnings
        tempfile.tempdir = {str(own_folder)!r}
        from geneva.execution.worker.output import captured
        from geneva.execution.worker.surroundings import Surroundings, enter_job
        enter_job(Surroundings(log_level=logging.INFO))
        with captured("job", "0-0") as output:
            print("out")
            print("err", file=sys.stderr)
            logging.getLogger("mine").info("logged")
            warnings.warn("beware", stacklevel=1)
            sys.stdout.write("no end of line")
            text = output()
        print("after")
        assert "after" not in text
        for wanted in ("out\\n", "err\\n", "INFO mine: logged", "beware", "no end of line\\n"):
            assert wanted in text, (wanted, text)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "after\n"), done.stderr


def test_the_end_is_kept_of_much_output(own_folder: Path):
    line = b"x" * 99 + b"\n"
    with captured("job", "0-0") as output:
        for number in range(8):
            os.write(1, b"%d\n" % number + line * 10_000)
        os.write(1, b"the end")
        text = output()
    assert text.endswith("x\nthe end\n")
    assert text.startswith("(... ")
    assert len(text) <= MAX_OUTPUT_BYTES + 100
    left_out = int(text.split()[1].replace(",", ""))
    assert 0 < left_out <= 8 * 1_000_000


def test_output_that_is_no_text(own_folder: Path):
    with captured("job", "0-0") as output:
        os.write(1, b"\x00\xff\x1b[31m\xc3\xa9\n")
        text = output()
    assert text == "\x00\\xff\x1b[31m\u00e9\n"


def test_somebody_tidies_up_meanwhile(own_folder: Path):
    with captured("job", "0-0") as output:
        os.write(1, b"said\n")
        for path in left_in(own_folder):
            path.unlink()
        assert output() == ""


def killed_worker(
    folder: Path, job: str, task: str, waits: str = "", *, printed: bool = True
) -> None:
    script = f"""
        import os, pathlib, signal, tempfile, time
        def is_seen():
            notes = pathlib.Path(tempfile.tempdir).rglob("*.seen")
            return any(note.read_text() not in ("", "0") for note in notes)
        tempfile.tempdir = {str(folder)!r}
        from geneva.execution.worker.output import captured
        with captured({job!r}, {task!r}) as output:
            if {printed}:
                print("before the end", flush=True)
            while {bool(waits)} and not is_seen():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_dead_worker_printed_is_found_by_the_next_attempt(own_folder: Path):
    killed_worker(own_folder, "job", "0-0")
    with captured("job", "0-1") as output:
        assert output() == ""
    with captured("job", "0-0") as output:
        os.write(1, b"again\n")
        text = output()
    assert text == "before the end\n(the worker died here)\nagain\n"
    assert not left_in(own_folder)


def test_what_nobody_can_ask_for_is_removed(own_folder: Path):
    """Its worker was forked from a process that is gone: so is its Spark, and its driver."""
    script = f"""
        import os, signal, tempfile
        tempfile.tempdir = {str(own_folder)!r}
        from geneva.execution.worker.output import captured
        if os.fork() == 0:
            with captured("dead", "0-0"):
                os.kill(os.getpid(), signal.SIGKILL)
        os.wait()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert len(left_in(own_folder)) == 1
    with captured("job", "0-0"):
        assert len(left_in(own_folder)) == 1, "its own"
    assert not left_in(own_folder)


def test_what_nobody_could_report_is_found_by_the_driver(own_folder: Path):
    killed_worker(own_folder, "job", "0-0")
    store = OutputStore(str(own_folder / "db"), Secrets())
    with OutputKeeper("job", store, (), None):
        pass
    (found,) = store.of_job("job")
    assert "before the end" in found.text
    assert lost_output("job") == LostOutput()


@pytest.mark.parametrize("printed", [True, False])
def test_workers_that_are_stopped_with_their_job_have_not_died(
    own_folder: Path,
    printed: bool,
):
    killed_worker(own_folder, "job", "0-0", printed=printed)
    store = OutputStore(str(own_folder / "db"), Secrets())
    with pytest.raises(JobCancelledError), OutputKeeper("job", store, (), None):
        raise JobCancelledError("stopped")
    kept = store.of_job("job")
    assert [(one.task, "died" in one.text) for one in kept] == (
        [("workers that were stopped", False)] if printed else []
    )


def test_secrets_are_not_kept_nor_shown(own_folder: Path):
    shown: list[str] = []
    store = OutputStore(str(own_folder / "db"), Secrets())
    hidden = (Secrets({"KEY": "s3cr3t-value"}),)
    with OutputKeeper("job", store, hidden, lambda each: shown.append(str(each))) as keeper:
        keeper.record("y, fragment 0", "using s3cr3t-value\n")
    assert shown == ["using ***\n"]
    assert str(store.of_job("job")) == "--- y, fragment 0\nusing ***\n"


def test_a_job_keeps_so_much_and_no_more(own_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keeping, "MAX_JOB_BYTES", 1000)
    store = OutputStore(str(own_folder / "db"), Secrets())
    with OutputKeeper("job", store, (), None) as keeper:
        for number in range(100):
            keeper.record(f"task {number}", "x" * 99 + "\n")
    found = store.of_job("job")
    assert len(found) == 11
    assert "is not kept" in found[-1].text


def test_a_terminal_obeys_nothing_of_it(own_folder: Path):
    store = OutputStore(str(own_folder / "db"), Secrets())
    with OutputKeeper("job", store, (), None) as keeper:
        keeper.record("y\x1b]0;owned\x07", "a\x1b[2Jb\x9bc\u202ed\r\n\ttab \u00e9\n")
    text = str(store.of_job("job"))
    assert all(sign.isprintable() or sign in "\n\t" for sign in text)
    assert "\ttab \u00e9" in text


def waits_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watching(folder: Path, shown: list[str], *secrets: str) -> OutputKeeper:
    hidden = (Secrets({str(i): secret for i, secret in enumerate(secrets)}),)
    store = OutputStore(str(folder / "db"), Secrets())
    return OutputKeeper("job", store, hidden, lambda each: shown.append(str(each)))


def test_who_watches_sees_lines_while_the_task_runs(own_folder: Path):
    shown: list[str] = []
    with watching(own_folder, shown, "s3cr3t-value") as keeper:
        with captured("job", "0-0") as output:
            os.write(1, b"using s3cr3t-value\nhalf a ")
            waits_for(lambda: bool(shown))
            assert "".join(shown) == "using ***\n", "whole lines, without what is secret"
            os.write(1, b"line\n\xff")
            text = output()
        assert output.is_shown
        keeper.record("y, fragment 0", text, output.is_shown)
        with captured("another job", "0-0") as others:
            os.write(1, b"not of this job\n")
            assert not others.is_shown
    assert "".join(shown) == "using ***\nhalf a line\n\\xff\n", "each once"
    found = OutputStore(str(own_folder / "db"), Secrets()).of_job("job")
    assert str(found) == "--- y, fragment 0\nusing ***\nhalf a line\n\\xff\n"
    assert not [*own_folder.rglob("*.live")]


def test_several_tasks_are_seen_line_by_line(own_folder: Path):
    shown: list[str] = []
    script = f"""
        import os, sys, tempfile
        tempfile.tempdir = {str(own_folder)!r}
        from geneva.execution.worker.output import captured
        with captured("job", sys.argv[1]) as output:
            for number in range(3_000):
                os.write(1, f"{{sys.argv[1]}} {{number}} {{'x' * 50}}\\n".encode())
            output()
        assert output.is_shown
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with watching(own_folder, shown):
        tasks = [subprocess.Popen([*command, name]) for name in ("a", "b")]
        assert [task.wait() for task in tasks] == [0, 0]
    lines = "".join(shown).splitlines()
    for name in ("a", "b"):
        wanted = [f"{name} {number} {'x' * 50}" for number in range(3_000)]
        assert [line for line in lines if line.startswith(name)] == wanted
    assert len(lines) == 6_000


def print_and_raise(text: str) -> None:
    os.write(1, text.encode())
    raise KeyError(text)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_task_printed_that_raised_is_seen_and_its_pipe_closed(own_folder: Path):
    shown: list[str] = []
    with watching(own_folder, shown):
        before = open_files()
        for attempt in range(3):
            with pytest.raises(KeyError), captured("job", f"0-{attempt}"):
                print_and_raise(f"attempt {attempt}, half a line")
        assert open_files() == before
    lines = "".join(shown).splitlines()
    assert [lines.count(f"attempt {attempt}, half a line") for attempt in range(3)] == [1, 1, 1]


def test_who_can_not_show_it_closes_the_pipe(own_folder: Path):
    class Stopped(Exception):
        """What a broken terminal raises, say."""

    def refuse(text: str) -> None:
        raise Stopped

    folder = output_folder()
    assert folder is not None
    before = open_files()
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
        with live_output.LiveReader(folder, "job", refuse):
            writer = live_output.LiveWriter.find(folder, "job")
            assert writer is not None
            writer.add(b"a line\n")
            waits_for(lambda: seen == [Stopped])
            writer.finish()
            waits_for(lambda: live_output.LiveWriter.find(folder, "job") is None)
    assert open_files() == before


def test_what_a_dead_worker_printed_is_shown_once(own_folder: Path):
    """Whether it was heard before its end, or had no time for that."""
    for waits in ("until it is heard", ""):
        shown: list[str] = []
        with watching(own_folder, shown):
            killed_worker(own_folder, "job", "0-0", waits)
        assert "".join(shown) == "before the end\n(the worker died here)\n"
    shown = []
    with watching(own_folder, shown):
        killed_worker(own_folder, "job", "0-0")
        with captured("job", "0-0") as output:
            os.write(1, b"again\n")
            output()
    assert "".join(shown) == "before the end\n(the worker died here)\nagain\n"
    assert not [*own_folder.rglob("*.seen")]
    (kept, *_) = OutputStore(str(own_folder / "db"), Secrets()).of_job("job")
    assert kept.text == "before the end\n(the worker died here)\n"


def test_who_does_not_read_holds_nobody_up(own_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_output, "_PATIENCE_SECONDS", 0.0)
    folder = output_folder()
    assert folder is not None
    os.mkfifo(folder / "job.live")
    pipe = os.open(folder / "job.live", os.O_RDONLY | os.O_NONBLOCK)
    with captured("job", "0-0") as output:
        for _ in range(40):
            os.write(1, (b"x" * 99 + b"\n") * 1_000)
        assert output().endswith("x\n")
    assert not output.is_shown, "so that it is shown when the task ends"
    os.close(pipe)
    with captured("job", "0-0") as output:
        os.write(1, b"nobody is there\n")
        assert output() == "nobody is there\n"
    assert not output.is_shown
