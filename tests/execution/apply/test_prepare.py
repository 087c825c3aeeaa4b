"""Functions in two steps: `prepare` ahead, `__call__` on what it gave, in order."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import geneva
from conftest import connect
from geneva import UDF, RateLimit, skip_on_error, udf
from geneva.config import Settings, set_variable
from geneva.errors import InvalidUDFError, UDFExecutionError, UDFTimeoutError
from geneva.execution.apply.batch import Applier
from geneva.execution.apply.preparing import (
    PrepareDied,
    PreparePool,
    _loaded,
    _OwnMemory,
    close_prepare_pool,
    prepare_pool,
)
from geneva.execution.runner import InProcessRunner
from geneva.udf.call import StatefulCallable
from geneva.udf.policy import Retry
from support import by_id, make_table

ROWS = 60


class Twice:
    """Doubles in the first step, and adds one in the second. Notes both in a file."""

    def __init__(self, log: str, bad: int = -1, wait: float = 0.0) -> None:
        self.log, self.bad, self.wait = log, bad, wait

    def note(self, step: str, ids: list[int]) -> None:
        with open(self.log, "a") as file:  # noqa: PTH123  one write, whoever writes at once
            file.write(json.dumps([step, ids, threading.current_thread().name]) + "\n")

    def setup(self) -> None:
        self.note("setup", [])

    def prepare(self, id: pa.Array) -> np.ndarray[Any, Any]:
        ids = id.to_numpy()
        self.note("prepare", ids.tolist())
        if self.bad in ids.tolist():
            if self.wait:
                time.sleep(self.wait)
            else:
                raise ValueError(f"can't prepare {self.bad}")
        return np.asarray(2 * ids)

    def __call__(self, doubled: np.ndarray[Any, Any]) -> pa.Array:
        self.note("call", (doubled // 2).tolist())
        return pa.array(doubled + 1)


class Notes:
    """What was noted."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notes")

    def lines(self, step: str) -> list[tuple[list[int], str]]:
        noted = map(json.loads, Path(self.path).read_text().splitlines())
        return [(ids, thread) for kind, ids, thread in noted if kind == step]

    def ids(self, step: str) -> list[list[int]]:
        return [ids for ids, _ in self.lines(step)]

    def threads(self, step: str) -> set[str]:
        return {thread for _, thread in self.lines(step)}


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


def declared(cls: type = Twice, **options: Any) -> UDF:
    options = {"batch_size": 5, "cpu_workers": 3, **options}
    return udf(data_type=pa.int64(), **options)(cls)  # type: ignore[no-any-return]


def run(folder: Path, function: UDF, sizes: list[int] | None = None) -> Any:
    table = make_table(connect(folder / "db", lambda: InProcessRunner(1)), sizes or [25, 35])
    table.add_columns({"c": function})
    return table, table.backfill("c")


EXPECTED = {i: 2 * i + 1 for i in range(ROWS)}


def test_one_model_and_batches_in_order(tmp_path: Path, notes: Notes) -> None:
    table, result = run(tmp_path, declared()(notes.path))
    assert by_id(table, "c") == EXPECTED
    assert result.rows_computed == ROWS
    assert len(notes.lines("setup")) == 1
    batches = [list(range(at, at + 5)) for at in range(0, ROWS, 5)]
    assert notes.ids("call") == batches, "in order, and full"
    assert sorted(notes.ids("prepare")) == batches, "each once"
    assert len(notes.threads("call")) == 1
    assert not notes.threads("call") & notes.threads("prepare")


def test_batches_are_prepared_at_the_same_time(tmp_path: Path, notes: Notes) -> None:
    class Meeting(Twice):
        def prepare(self, id: pa.Array) -> Any:
            prepared = super().prepare(id)
            deadline = time.monotonic() + 20
            while Path(self.log).read_text().count('["prepare"') < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return prepared

    table, _ = run(tmp_path, declared(Meeting)(notes.path), [30])
    assert by_id(table, "c") == {i: 2 * i + 1 for i in range(30)}
    assert len(notes.threads("prepare")) == 3
    order = [line.split('"')[1] for line in Path(notes.path).read_text().splitlines()]
    assert order[1:4] == ["prepare"] * 3


def test_tokens_are_counted_by_the_inputs(tmp_path: Path, notes: Notes) -> None:
    """And not by what `prepare` made of them, whichever of the two a call is made with."""
    path = str(tmp_path / "counted")

    def tokens(id: pa.Array) -> float:
        with open(path, "a") as file:  # noqa: PTH123
            file.write(json.dumps(id.to_pylist()) + "\n")
        return 1

    limit = RateLimit(tokens_per_minute=1_000_000, tokens=tokens)
    function = declared(rate_limit=limit, on_error=skip_on_error())(notes.path, bad=7)
    table, _ = run(tmp_path, function, [10])
    assert by_id(table, "c") == {**{i: 2 * i + 1 for i in range(10)}, 7: None}
    counted = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert counted[0] == [0, 1, 2, 3, 4]
    assert [7] in counted, "by itself, at last"


def test_a_row_that_can_not_be_prepared_is_named(tmp_path: Path, notes: Notes) -> None:
    with pytest.raises(UDFExecutionError, match=r"fragment 1.*can't prepare 37"):
        run(tmp_path, declared()(notes.path, bad=37))


def test_a_row_that_can_not_be_prepared_is_skipped_alone(tmp_path: Path, notes: Notes) -> None:
    table, result = run(tmp_path, declared(on_error=skip_on_error())(notes.path, bad=37))
    assert by_id(table, "c") == {**EXPECTED, 37: None}
    assert result.rows_failed == 1
    (error,) = table.get_errors()
    assert "can't prepare 37" in error.message


@pytest.mark.slow
def test_preparing_is_tried_again(tmp_path: Path, notes: Notes) -> None:
    class Flaky(Twice):
        def prepare(self, id: pa.Array) -> Any:
            prepared = super().prepare(id)
            if 37 in id.to_pylist() and Path(self.log).read_text().count(" 37,") < 3:
                raise OSError("not yet")
            return prepared

    function = declared(Flaky, on_error=[Retry(OSError, max_attempts=5, backoff="fixed")])
    table, _ = run(tmp_path, function(notes.path))
    assert by_id(table, "c") == EXPECTED
    assert sum(37 in ids for ids in notes.ids("prepare")) == 3
    assert sum(37 in ids for ids in notes.ids("call")) == 1


def test_preparing_has_the_time_limit_of_calls(tmp_path: Path, notes: Notes) -> None:
    with pytest.raises(UDFTimeoutError, match=r"longer than timeout=0\.2 s"):
        run(tmp_path, declared(timeout=0.2)(notes.path, bad=12, wait=1.0))


def test_a_function_of_record_batches(tmp_path: Path, notes: Notes) -> None:
    class Whole(Twice):
        def prepare(self, batch: pa.RecordBatch) -> Any:  # type: ignore[override]
            assert batch.schema.names == ["id"]
            return super().prepare(batch.column(0))

    table, _ = run(tmp_path, declared(Whole, input_columns=["id"])(notes.path))
    assert by_id(table, "c") == EXPECTED


def test_called_by_hand_it_does_both_steps(notes: Notes) -> None:
    assert declared()(notes.path)(pa.array([1, 2])).to_pylist() == [3, 5]


def test_threads_of_calls_prepare_for_themselves(notes: Notes) -> None:
    with Applier(declared()(notes.path), pa.field("c", pa.int64()), threads=2) as applier:
        assert applier.prepares == 0
        assert applier.apply(pa.record_batch({"id": range(6)})).to_pylist() == [1, 3, 5, 7, 9, 11]


def test_equal_inputs_share_both_steps(tmp_path: Path, notes: Notes) -> None:
    table, _ = run(tmp_path, declared(memoize=True)(notes.path))
    assert by_id(table, "c") == EXPECTED


class TestDeclaring:
    def test_prepare_is_part_of_the_version(self) -> None:
        class Other(Twice):
            def prepare(self, id: pa.Array) -> Any:
                return 2 * id.to_numpy()

        Other.__name__ = Other.__qualname__ = "Twice"
        version = declared()("log").version
        assert declared(Other)("log").version != version
        assert declared(cpu_workers=9)("log").version == version, "how many is not"

    def test_without_cpu_workers_prepare_is_a_method_like_any_other(self) -> None:
        class Own:
            def prepare(self, x: int) -> int:
                return 2 * x

            def __call__(self, id: int) -> int:
                return self.prepare(id) + 1

        assert udf(Own)()(4) == 9

    def test_what_has_no_prepare_is_refused(self) -> None:
        def plain(id: pa.Array) -> pa.Array:
            return id

        with pytest.raises(InvalidUDFError, match=r"cpu_workers is for classes with .*prepare"):
            udf(plain, data_type=pa.int64(), cpu_workers=2)

    def test_rows_are_not_prepared_one_by_one(self) -> None:
        class ByRow:
            def prepare(self, id: int) -> int:
                return id

            def __call__(self, id: int) -> int:
                return id

        with pytest.raises(InvalidUDFError, match="once per batch"):
            udf(ByRow, data_type=pa.int64(), cpu_workers=2)

    @pytest.mark.parametrize("number", [0, -1, 1.5, True])
    def test_numbers_that_can_not_be_meant(self, number: Any) -> None:
        with pytest.raises(InvalidUDFError, match="cpu_workers"):
            declared(cpu_workers=number)


# --------------------------------------------------------------------- in processes of their own


class Apart:
    """Says by `setup_prepare` that its `prepare` needs nothing of `setup`. Notes who does what."""

    def __init__(self, log: str, bad: int = -1, deadly: int = -1) -> None:
        self.log, self.bad, self.deadly = log, bad, deadly

    def note(self, step: str, ids: list[int]) -> None:
        with open(self.log, "a") as file:  # noqa: PTH123  one write, whoever writes at once
            file.write(json.dumps([step, ids, str(os.getpid())]) + "\n")

    def setup_prepare(self) -> None:
        self.note("setup_prepare", [])
        self.factor = 2

    def setup(self) -> None:
        self.note("setup", [])
        self.model = threading.Lock()  # can't be pickled, as models on a GPU can't be

    def prepare(self, id: pa.Array) -> np.ndarray[Any, Any]:
        ids = id.to_numpy()
        self.note("prepare", ids.tolist())
        if self.deadly in ids.tolist() and not Path(f"{self.log}.died").exists():
            Path(f"{self.log}.died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bad in ids.tolist():
            raise ValueError(f"can't prepare {self.bad}")
        return np.asarray(self.factor * ids)

    def __call__(self, doubled: np.ndarray[Any, Any]) -> pa.Array:
        with self.model:
            self.note("call", (doubled // 2).tolist())
            return pa.array(doubled + 1)


class Reusing:
    """Prepares each batch in the same buffer, which an object of its own may do."""

    def __init__(self, log: str) -> None:
        self.log = log

    def setup_prepare(self) -> None:
        with open(self.log, "a") as file:  # noqa: PTH123  one write, whoever writes at once
            file.write(json.dumps(["setup_prepare", [], threading.current_thread().name]) + "\n")
        self.buffer = np.zeros(5, np.int64)

    def prepare(self, id: pa.Array) -> np.ndarray[Any, Any]:
        time.sleep(0.005)
        self.buffer[:] = 2 * id.to_numpy()
        return self.buffer

    def __call__(self, doubled: np.ndarray[Any, Any]) -> pa.Array:
        time.sleep(0.01)
        return pa.array(doubled + 1)


@pytest.mark.parametrize(
    "spark", [False, pytest.param(True, marks=[pytest.mark.spark, pytest.mark.slow])]
)
def test_objects_of_their_own_may_use_a_buffer_again(
    tmp_path: Path, notes: Notes, *, spark: bool
) -> None:
    db = connect(tmp_path / "db", None if spark else lambda: InProcessRunner(1))
    table = make_table(db, [25, 35])
    table.add_columns({"c": declared(Reusing)(notes.path)})
    assert table.backfill("c").rows_computed == ROWS
    assert by_id(table, "c") == EXPECTED
    if not spark:
        made = [n for _, n in notes.lines("setup_prepare") if n.startswith("geneva-prepare")]
        assert 1 <= len(made) == len(set(made)) <= 3, "one object for each thread"


class WithLibrary:
    """Works with a module that it is given."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def setup_prepare(self) -> None:
        """There is nothing to set up."""

    def prepare(self, id: pa.Array) -> Any:
        return self.library.multiply(id.to_numpy(), 2)

    def __call__(self, doubled: Any) -> pa.Array:
        return pa.array(doubled + 1)


@pytest.mark.parametrize(
    "make", [lambda: declared(WithLibrary)(np), lambda: declared(WithLibrary(np))]
)
@pytest.mark.parametrize(
    "spark", [False, pytest.param(True, marks=[pytest.mark.spark, pytest.mark.slow])]
)
def test_objects_may_have_modules(tmp_path: Path, make: Callable[[], UDF], *, spark: bool) -> None:
    db = connect(tmp_path / "db", None if spark else lambda: InProcessRunner(1))
    table = make_table(db, [25, 35])
    table.add_columns({"c": make()})
    assert table.backfill("c").rows_computed == ROWS
    assert by_id(table, "c") == EXPECTED


@dataclasses.dataclass
class Item:
    id: int


class Kind(enum.Enum):
    EVEN = 0
    ODD = 1


class Asking:
    """Asks for the classes of what it has prepared."""

    def __init__(self, log: str) -> None:
        self.log = log

    def setup_prepare(self) -> None:
        pass

    def prepare(self, id: pa.Array) -> list[tuple[Item, Kind]]:
        return [(Item(i), Kind(i % 2)) for i in id.to_pylist()]

    def __call__(self, items: list[tuple[Item, Kind]]) -> pa.Array:
        assert all(isinstance(item, Item) for item, _ in items)
        assert all((kind is Kind.ODD) == bool(item.id % 2) for item, kind in items)
        return pa.array([2 * item.id + 1 for item, _ in items])


@pytest.mark.parametrize(
    "spark", [False, pytest.param(True, marks=[pytest.mark.spark, pytest.mark.slow])]
)
def test_what_is_prepared_is_of_the_same_classes(
    tmp_path: Path, notes: Notes, *, spark: bool
) -> None:
    db = connect(tmp_path / "db", None if spark else lambda: InProcessRunner(1))
    table = make_table(db, [25, 35])
    table.add_columns({"c": declared(Asking)(notes.path)})
    assert table.backfill("c").rows_computed == ROWS
    assert by_id(table, "c") == EXPECTED


class Given:
    """Computes with a module that it was given."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def setup_prepare(self) -> None:
        pass

    def prepare(self, id: pa.Array) -> Any:
        return self.module.doubled(id.to_numpy())

    def __call__(self, doubled: Any) -> pa.Array:
        return pa.array(doubled + 1)


def test_an_object_that_each_thread_has_may_hold_modules(tmp_path: Path) -> None:
    module = types.ModuleType("mine_given")
    exec("def doubled(ids): return 2 * ids", vars(module))
    table, _ = run(tmp_path, declared(Given)(module))
    assert by_id(table, "c") == EXPECTED


class Odd(Exception):
    """An error that can be pickled, and not made again from its pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Awkward:
    """Does what a process can't hand over, or never ends."""

    def setup_prepare(self) -> None:
        """There is nothing to set up."""

    def prepare(self, id: pa.Array) -> Any:
        (what,) = id.to_pylist()
        if what == 0:
            raise Odd(1, 2)
        if what == 1:
            return threading.Lock()
        if what == 2:
            os.write(1, b"begun")
            while True:
                time.sleep(60)
        if what == 4:
            os._exit(4)
        print("prepared", what)  # noqa: T201
        return what

    def __call__(self, prepared: Any) -> pa.Array:
        return pa.array([prepared])


def one(what: int) -> pa.RecordBatch:
    return pa.record_batch({"id": [what]})


def test_what_a_process_prints_goes_where_its_worker_prints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pool = PreparePool(declared(Awkward, cpu_workers=1)())
    assert pool(one(3)) == 3
    pool.close()
    assert capfd.readouterr().err == "prepared 3\n"


def test_a_process_says_what_it_can_not_hand_over() -> None:
    with closing(PreparePool(declared(Awkward, cpu_workers=1)())) as pool:
        pids = pool.pids
        with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
            pool(one(0))
        with pytest.raises(TypeError, match="pickle"):
            pool(one(1))
        assert pool(one(3)) == 3, "and goes on"
        assert pool.pids == pids
        with pytest.raises(PrepareDied):
            pool(one(4))


class GivenUp(BaseException):
    """Comes in the midst of a call, as at a time limit."""


def test_one_whose_batch_was_given_up_is_replaced() -> None:
    def give_up(*_: Any) -> None:
        raise GivenUp

    handler = signal.signal(signal.SIGALRM, give_up)
    try:
        with closing(PreparePool(declared(Awkward, cpu_workers=1)())) as pool:
            pids = pool.pids
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(GivenUp):
                pool(one(2))
            wait_for_end({*map(str, pids)})
            assert pool(one(3)) == 3
            assert pool.pids != pids
    finally:
        signal.signal(signal.SIGALRM, handler)


class Wide:
    """Returns more than goes through a connection."""

    def setup_prepare(self) -> None:
        """There is nothing to set up."""

    def prepare(self, id: pa.Array) -> Any:
        (rows,) = id.to_pylist()
        whole = np.arange(rows * 1_000, dtype=np.float64).reshape(rows, 1_000)
        return {"wide": whole, "small": np.arange(3), "table": pa.table({"x": whole[:, 0]})}

    def __call__(self, prepared: Any) -> pa.Array:
        return pa.array([0])


def test_arrays_lie_in_memory_that_is_used_again_when_nobody_holds_them() -> None:
    with closing(PreparePool(declared(Wide, cpu_workers=1)())) as pool:
        (process,) = pool._processes
        held = []
        for rows in (1_000, 900, 1_000, 2_000, 3, 1_000):
            answer = pool(one(rows))
            expected = np.arange(rows * 1_000, dtype=np.float64).reshape(rows, 1_000)
            assert np.array_equal(answer["wide"], expected)
            assert answer["small"].tolist() == [0, 1, 2]
            assert answer["table"]["x"].to_pylist() == expected[:, 0].tolist()
            answer["wide"] += 1  # it is the worker's own
            held.append((answer["wide"], expected))
            assert all(np.array_equal(array, was + 1) for array, was in held)
            if len(held) == 3:
                held.clear()
        del answer
        held.clear()
        blocks = [*process._blocks]
        for _ in range(5):
            pool(one(1_000))
        assert [*process._blocks] == blocks, "no memory but what was there"
        batch = pa.record_batch({"id": range(1_000)}).slice(700, 1)
        assert pool(batch)["wide"].shape == (700, 1_000), "of a slice that alone"


def test_memory_that_could_not_be_had_leaves_none_behind() -> None:
    """What was let go of to make room is told with the next answer, and is no answer's twice."""

    class Full(_OwnMemory):
        is_full = False

        def _made(self, size: int) -> Any:
            if self.is_full:
                raise OSError("no memory")
            return super()._made(size)

    def answer(size: int) -> Any:
        return memory.take_over([memoryview(b"pickle"), memoryview(bytes(size))])

    def told(parts: Any) -> tuple[int, tuple[int, ...]]:
        shared = _loaded(parts)
        return shared.block, shared.dropped

    memory = Full()
    first, block = answer(100)
    assert (told(first), block is not None) == ((0, ()), True)
    memory.unused.add(0)
    memory.is_full = True
    with pytest.raises(OSError, match="no memory"):
        answer(1_000)
    memory.is_full = False
    parts, block = answer(1_000)
    assert (told(parts), block is not None) == ((1, (0,)), True)
    memory.unused.add(1)
    parts, block = answer(900)
    assert (told(parts), block) == ((1, ()), None), "used again, and nothing new to tell"
    for kept in memory._blocks.values():
        kept.file.close()


def test_a_function_has_one_pool_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    function = declared(Awkward, cpu_workers=1)()
    assert isinstance(function.func, StatefulCallable)
    try:
        pids = prepare_pool(function).pids
        assert len(pids) == 1
        assert prepare_pool(function.with_inputs(["other"])).pids == pids
        monkeypatch.setenv("GENEVA_TEST_POOL", "set by the function")
        assert prepare_pool(function).pids == pids
        monkeypatch.setenv("GENEVA_TEST_VARIABLE", "old")
        set_variable("GENEVA_TEST_VARIABLE", "of another job")
        others = prepare_pool(function).pids
        assert not {*others} & {*pids}
        wait_for_end({*map(str, pids)})
    finally:
        close_prepare_pool(function.func)
    wait_for_end({*map(str, others)})


WORKER = """
import sys
sys.path[:0] = {path!r}
from test_prepare import Awkward, declared, one
from geneva.execution.apply.preparing import PreparePool
pool = PreparePool(declared(Awkward, cpu_workers=1)())
print(*pool.pids, flush=True)
pool(one(2))
"""


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_its_worker() -> None:
    start = WORKER.format(path=[str(Path(__file__).parent), *sys.path])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", start], bufsize=0, **pipes) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        pid = worker.stdout.readline().decode().strip()
        assert worker.stderr.read(5) == b"begun"
        worker.kill()
    wait_for_end({pid})


def wait_for_end(processes: set[str]) -> None:
    """Wait until processes are gone."""
    deadline = time.monotonic() + 30
    while processes and time.monotonic() < deadline:
        processes = {pid for pid in processes if Path(f"/proc/{pid}").exists()}
        time.sleep(0.05)
    assert not processes


@pytest.mark.spark
@pytest.mark.slow
class TestProcesses:
    def run(self, folder: Path, function: UDF) -> Any:
        quiet = Settings(local_slots=1, jvm_archive=False, progress=False)
        table = make_table(geneva.connect(folder / "db", settings=quiet), [25, 35])
        table.add_columns({"c": function})
        # Spark may be there already, with more slots.
        return table, table.backfill("c", concurrency=1)

    def test_one_model_and_batches_in_order(self, tmp_path: Path, notes: Notes) -> None:
        table, _ = self.run(tmp_path, declared(Apart)(notes.path))
        assert by_id(table, "c") == EXPECTED
        batches = [list(range(at, at + 5)) for at in range(0, ROWS, 5)]
        assert notes.ids("call") == batches, "in order, and full"
        assert sorted(notes.ids("prepare")) == batches, "each once"
        assert len(notes.lines("setup")) == 1, "one model"
        assert len(notes.threads("call")) == 1
        assert notes.threads("call") == notes.threads("setup")
        assert len(notes.threads("prepare")) == 3, "a process each"
        assert not notes.threads("call") & notes.threads("prepare")
        assert notes.threads("prepare") <= notes.threads("setup_prepare")
        table.add_columns({"d": declared(Apart)(notes.path)})
        table.backfill("d", concurrency=1, task_size=25)
        assert by_id(table, "d") == EXPECTED
        workers = len(notes.threads("call"))  # another one, if Spark's other worker had the turn
        assert len(notes.threads("setup_prepare")) == 4 * workers, "three each, and the worker"
        assert len(notes.lines("setup")) == workers, "one model each"

    def test_a_row_that_can_not_be_prepared(self, tmp_path: Path, notes: Notes) -> None:
        function = declared(Apart, on_error=skip_on_error())(notes.path, bad=17)
        table, result = self.run(tmp_path, function)
        assert by_id(table, "c") == {**EXPECTED, 17: None}
        assert result.rows_failed == 1
        (error,) = table.get_errors()
        assert "can't prepare 17" in error.error_message

    def test_it_fails_with_the_users_own_error(self, tmp_path: Path, notes: Notes) -> None:
        with pytest.raises(UDFExecutionError, match="can't prepare 17"):
            self.run(tmp_path, declared(Apart)(notes.path, bad=17))

    def test_one_that_is_killed(self, tmp_path: Path, notes: Notes) -> None:
        table, _ = self.run(tmp_path, declared(Apart)(notes.path, deadly=17))
        assert Path(f"{notes.path}.died").exists()
        assert by_id(table, "c") == EXPECTED

    def test_they_end_with_their_worker(self, tmp_path: Path, notes: Notes) -> None:
        self.run(tmp_path, declared(Apart)(notes.path))
        (worker,) = notes.threads("call")
        os.kill(int(worker), signal.SIGKILL)
        wait_for_end(notes.threads("prepare"))
