"""What reaches Spark's workers of the driver's environment and modules, and what they print."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

import geneva
from geneva import udf
from geneva.config import Settings
from geneva.errors import UDFExecutionError
from geneva.manifest import GenevaManifest
from support import connect

pytestmark = pytest.mark.spark


def variables(x: int) -> str:
    import os

    names = ("GENEVA_TEST_LATER", "GENEVA_TEST_KEY", "GENEVA_TEST_MINE", "SPARK_TEST_OWN")
    return " ".join(str(os.environ.get(name)) for name in names)


@pytest.mark.slow
def test_variables_and_modules_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    quiet = Settings(local_slots=2, jvm_archive=False, progress=False)
    key = {"GENEVA_TEST_KEY": "s3cr3t-value"}
    db = geneva.connect(tmp_path / "db", settings=quiet, env=key)
    table = db.create_table("t", pa.table({"x": list(range(4))}))
    seen = []
    table.add_columns({"e": udf(variables, env={"GENEVA_TEST_MINE": "mine"})})
    for value in ("one", "two", None):
        if value is None:
            monkeypatch.delenv("GENEVA_TEST_LATER")
        else:
            monkeypatch.setenv("GENEVA_TEST_LATER", value)
        table.backfill("e", where="x >= 0")
        monkeypatch.setenv("SPARK_TEST_OWN", "not for workers: Spark has them already")
        (told,) = set(table.to_arrow()["e"].to_pylist())
        seen.append(told)
    assert seen == [f"{value} s3cr3t-value mine None" for value in ("one", "two", None)]

    # A module beside the user's script, and one that can't be shipped.
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    (folder / "spark_helpers.py").write_text("def g(x):\n    print('g of', x)\n    return x + 1\n")
    monkeypatch.setitem(os.environ, "GENEVA_TEST_LATER", "three")

    def imports(x: int) -> int:
        import os

        import spark_helpers

        os.write(1, f"the key is {os.environ['GENEVA_TEST_KEY']}\n".encode())
        os.write(2, b"\x1b[31mC code\n")
        return spark_helpers.g(x)

    table.add_columns({"y": udf(imports)})
    capfd.readouterr()
    job = table.backfill("y", logs=True)
    assert table.to_arrow()["y"].to_pylist() == [1, 2, 3, 4]
    assert "spark_helpers" not in sys.modules, "nothing was imported here"
    text = str(db.get_job(job).logs())
    assert sorted(line for line in text.splitlines() if line.startswith("g of")) == [
        f"g of {x}" for x in range(4)
    ]
    assert "the key is ***" in text
    assert "s3cr3t" not in text
    assert "\\x1b[31mC code" in text
    assert "g of 3" in capfd.readouterr().err
    history = (tmp_path / "db" / "_geneva").rglob("*")
    assert not any(b"s3cr3t" in path.read_bytes() for path in history if path.is_file())


@pytest.mark.slow
def test_output_is_seen_while_a_task_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    db = connect(tmp_path / "db", None)
    table = db.create_table("t", pa.table({"x": [7]}))
    gate = tmp_path / "gate"

    def patient(x: int) -> int:
        import time

        print("waiting for the gate")  # noqa: T201
        while not gate.exists():
            time.sleep(0.01)
        print("through the gate")  # noqa: T201
        return x

    table.add_columns({"y": udf(patient)})
    capfd.readouterr()
    job, seen = table.backfill_async("y", logs=True), ""
    while "waiting for the gate\n" not in seen:
        assert not job.done()
        time.sleep(0.01)
        seen += capfd.readouterr().err
    gate.touch()
    job.result()
    seen += capfd.readouterr().err
    assert [line for line in seen.splitlines() if "gate" in line] == [
        "waiting for the gate",
        "through the gate",
    ]
    assert "waiting for the gate\nthrough the gate\n" in str(db.get_job(job.job_id).logs())


@pytest.mark.slow
def test_a_command_shows_output_while_its_first_task_runs(tmp_path: Path):
    """The job is older than its Spark, whose folder the output is kept in."""
    table = connect(tmp_path / "db", None).create_table("t", pa.table({"x": [7]}))
    gate = str(tmp_path / "gate")

    def patient(x: int) -> int:
        import os
        import time

        print("waiting for the gate")  # noqa: T201
        while not os.path.exists(gate):  # noqa: PTH110
            time.sleep(0.01)
        return x

    table.add_columns({"y": udf(patient)})
    line = [sys.executable, "-m", "geneva", "backfill", str(tmp_path / "db"), "t", "y", "--logs"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as command:
        assert command.stderr is not None
        try:
            assert any(b"waiting for the gate" in line for line in command.stderr)
            assert command.poll() is None
        finally:
            Path(gate).touch()
        command.stderr.read()
    assert command.returncode == 0
    assert connect(tmp_path / "db", None).open_table("t").to_arrow()["y"].to_pylist() == [7]


def test_a_compiled_module_beside_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real extension module, under the user's own package: workers here find it as we do."""
    import _heapq
    import shutil

    origin = getattr(_heapq, "__file__", None)
    if origin is None:
        pytest.skip("this Python has no extension modules of its own in files")
    package = tmp_path / "project" / "compiled_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from ._heapq import heapify\n")
    shutil.copy(origin, package / f"_heapq{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    monkeypatch.syspath_prepend(str(package.parent))
    from compiled_mine import heapify  # type: ignore[import-not-found]

    def smallest(x: int) -> int:
        values = [x, 0, 5]
        heapify(values)
        return values[0]

    db = connect(tmp_path / "db", None)
    table = db.create_table("t", pa.table({"x": [3, -1]}))
    table.add_columns({"y": udf(smallest)})
    table.backfill("y")
    assert table.to_arrow()["y"].to_pylist() == [0, -1]


def word_of_the_manifest(x: int) -> str:
    import of_a_manifest  # type: ignore[import-not-found]

    return f"{of_a_manifest.WORD} {of_a_manifest.TIMES_IMPORTED}"


class Remembering:
    """Imports a module once, and keeps it."""

    def setup(self) -> None:
        import of_a_manifest

        self.module = of_a_manifest

    def __call__(self, x: int) -> str:
        return str(self.module.WORD)


@pytest.mark.slow
def test_each_job_has_the_modules_of_its_own_contexts(tmp_path: Path):
    """Also where one worker process serves them all, and a module was edited meanwhile."""
    quiet = Settings(local_slots=1, jvm_archive=False, progress=False)
    db = geneva.connect(tmp_path / "db", settings=quiet)
    table = db.create_table("t", pa.table({"x": list(range(4))}))
    table.add_columns({"w": udf(word_of_the_manifest), "r": udf(Remembering)})

    def manifest(folder: str, word: str) -> GenevaManifest:
        module = tmp_path / folder / "of_a_manifest.py"
        module.parent.mkdir(exist_ok=True)
        times = "import builtins\nTIMES = vars(builtins).setdefault('manifest_times', [])\n"
        module.write_text(f"{times}TIMES.append(1)\nTIMES_IMPORTED = len(TIMES)\nWORD = {word!r}\n")
        return GenevaManifest.create_pip(folder).py_modules([str(module.parent)]).build()

    def told(*manifests: GenevaManifest) -> list[set[str]]:
        with contextlib.ExitStack() as contexts:
            for each in manifests:
                contexts.enter_context(db.context(manifest=each))
            for name in ("w", "r"):
                table.backfill(name, where="x >= 0")
        return [set(table.to_arrow()[name].to_pylist()) for name in ("w", "r")]

    path = list(sys.path)
    one, two = manifest("one", "first"), manifest("two", "second")
    assert told(one) == [{"first 1"}, {"first"}]
    assert told(two) == [{"second 2"}, {"second"}]
    assert told(one) == [{"first 1"}, {"first"}], "imported once, in one and the same process"
    assert told(one, two) == [{"second 3"}, {"second"}], "the inner context counts"
    manifest("one", "edited")
    assert told(one) == [{"edited 4"}, {"edited"}]
    assert [entry for entry in sys.path if entry.endswith(".zip") and entry not in path] == []
    with pytest.raises(UDFExecutionError, match="No module named 'of_a_manifest'"):
        table.backfill("w", where="x >= 0")
