"""Processes that run a class's `prepare`: one pool for each function in a worker.

A process has an object of its own, on which `setup_prepare` was called and `setup` was not: the
model stays in the worker. Both sides speak in pickles. Large buffers of what `prepare` returns lie
in memory that both have: the worker reads them where the process wrote them, and the process uses
that memory again when nobody holds them any more. A process ends when its worker closes the
connection, or dies, in the midst of a batch too; the memory goes with the last of the two.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import itertools
import mmap
import os
import pickle
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle
import numpy as np
import pyarrow as pa

from geneva.config import variables_set
from geneva.execution.apply.by_batch import as_parameters
from geneva.execution.apply.compact import compact_batch
from geneva.execution.apply.forks import ending_copies, note_worker
from geneva.execution.apply.tensors import is_plain_tensor
from geneva.render.values import error_text
from geneva.udf.call import StatefulCallable, UDFArgType
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf_digest
from geneva.udf.identity.user_code import is_module
from geneva.udf.shipped_modules import activate

_START = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve{arguments}"
_COUNT = struct.Struct("<Q")
_PATIENCE_SECONDS = 5.0
_WATCH_SECONDS = 1.0
_CHUNK_BYTES = 65_536
_MIN_SHARED_BYTES = 1024 * 1024
"""Buffers of fewer bytes go through the connection."""
_ALIGNMENT = 64
_SPARE = 1.25
"""Memory is taken a little larger than what it is for: the next batch may be, too."""


class PrepareDied(Exception):
    """A process has ended in the midst of a batch, whatever ended it."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What `prepare` raised, and where in the user's code."""

    error: BaseException
    trace: str


@dataclass(frozen=True, slots=True)
class _Shared:
    """What `prepare` returned: a pickle, whose buffers lie in shared memory."""

    block: int
    """The memory. Its file comes with the message, the first time that it is used."""
    places: tuple[tuple[int, int], ...]
    """Where in the block the buffers begin and end."""
    data: bytes
    dropped: tuple[int, ...]
    """Blocks that the process has let go of."""


class _RemoteTrace(Exception):
    """Shows, as the cause of an error, where it was raised in the other process."""


# ----------------------------------------------------------------------------------- the worker


_POOLS: weakref.WeakKeyDictionary[StatefulCallable, PreparePool] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def prepare_pool(udf: UDF) -> PreparePool:
    """The processes of a function, which are started when there are none.

    They serve every task and column of this worker. Others take their place where a job has
    variables that they were not started with.
    """
    assert isinstance(udf.func, StatefulCallable)
    with _LOCK:
        pool = _POOLS.get(udf.func)
        if pool is None or pool.variables != variables_set():
            if pool is not None:
                pool.close()
            pool = _POOLS[udf.func] = PreparePool(udf)
    return pool


def close_prepare_pool(func: StatefulCallable) -> None:
    """End the processes of a function, if it has any; the next use starts others."""
    with _LOCK:
        pool = _POOLS.pop(func, None)
    if pool is not None:
        pool.close()


class PreparePool:
    """The processes of one function. Each works on one batch at a time."""

    def __init__(self, udf: UDF) -> None:
        """Start all of them; they load the function by themselves."""
        self.variables = variables_set()
        self._function = serialize_udf(udf)
        self._processes = [PrepareProcess(self._function) for _ in range(udf.cpu_workers or 1)]
        self.is_closed = False
        self._idle: queue.SimpleQueue[PrepareProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Return what `prepare` gives for a batch, or raise what it raises."""
        process = self._idle.get()
        try:
            return process(batch)
        finally:
            if process.is_answering:  # to a batch that was given up: nobody listens any more
                process.kill()
                self._processes.remove(process)
                process = PrepareProcess(self._function)
                self._processes.append(process)
            self._idle.put(process)

    def close(self) -> None:
        """End the processes, and wait for their end; those that go on are ended all the same."""
        self.is_closed = True
        for process in self._processes:
            process.hang_up()
        for process in self._processes:
            process.join()


class PrepareThreads:
    """Does in threads what the processes of a function do, where there are none.

    Each thread has an object of its own, and what leaves it is a copy: `prepare` may use its
    buffers again for the next batch.
    """

    def __init__(self, udf: UDF) -> None:
        """Make no object yet."""
        self._udf, self._own = udf, threading.local()

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Return what `prepare` gives for a batch, or raise what it raises."""
        if not hasattr(self._own, "prepare"):
            # Of the classes that are here: the function may ask for the class of what it gets.
            self._own.prepare = _prepare_of(_copied(self._udf.func), self._udf.arg_type)
        return _loaded([bytearray(part) for part in _parts(self._own.prepare(batch))])


def _copied(value: Any) -> Any:
    """Return a deep copy. Modules are shared as functions and classes are: none can be copied.

    Those that came with a function are in no list of the process's modules, and what is frozen is
    in no list of the collector's.
    """
    known = (*sys.modules.values(), *gc.get_objects())
    return copy.deepcopy(value, {id(module): module for module in known if is_module(module)})


class PrepareProcess:
    """A process that runs the `prepare` of one function."""

    def __init__(self, function: bytes) -> None:
        """Start it, with a function that was serialized."""
        own, theirs = socket.socketpair()
        with theirs, _memory_file(len(function)) as file:
            file.write(function)
            file.flush()
            fds = (theirs.fileno(), file.fileno())
            start = _START.format(
                path=sys.path, module=__name__, arguments=(*fds, len(function), os.getpid())
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                # Each has a core: libraries that start a thread for each core would get in the way.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._printing = threading.Thread(target=self._print, name="geneva-print", daemon=True)
        self._printing.start()
        self._connection = own
        self.is_answering = False
        """Whether it was given a batch, and its answer has not come yet."""
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._unused: deque[int] = deque()
        """Blocks whose contents nobody holds any more."""

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Return what `prepare` gives for a batch, or raise what it raises."""
        self.is_answering = True
        try:
            unused = tuple(self._unused.popleft() for _ in range(len(self._unused)))
            # Not as a slice: the whole array behind it would travel.
            _send_parts(self._connection, _parts((compact_batch(batch), unused)))
            parts, fds = _receive_parts(self._connection)
        except (EOFError, OSError):
            self.is_answering = False
            raise PrepareDied from None
        self.is_answering = False
        answer = _loaded(parts)
        if isinstance(answer, _Failed):
            raise answer.error from _RemoteTrace(answer.trace)
        return self._shared(answer, fds) if isinstance(answer, _Shared) else answer

    def _shared(self, answer: _Shared, fds: Sequence[int]) -> Any:
        """What lies in shared memory, without a copy of it."""
        for dropped in answer.dropped:
            del self._blocks[dropped]
        for fd in fds:
            try:
                self._blocks[answer.block] = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
            finally:
                os.close(fd)
        whole = self._blocks[answer.block][:]
        # All that is made of it holds this very object, by way of a memoryview.
        weakref.finalize(whole, self._unused.append, answer.block).atexit = False
        buffers = [whole.data[start:end] for start, end in answer.places]
        return _loaded([memoryview(answer.data), *buffers])

    def hang_up(self) -> None:
        """Let it end after the batch that it is at."""
        self._connection.close()

    def kill(self) -> None:
        """End it now."""
        self.hang_up()
        self._process.kill()
        self.join()

    def join(self) -> None:
        """Wait for its end; one that goes on is ended all the same."""
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._printing.join(_PATIENCE_SECONDS)

    def _print(self) -> None:
        """Print what it prints, as long as it lives: where to is another place for each task."""
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            while chunk := os.read(printed.fileno(), _CHUNK_BYTES):
                os.write(2, chunk)


# ---------------------------------------------------------------------------------- the process


def serve(connection_fd: int, function_fd: int, size: int, worker: int) -> None:
    """The process: prepare one batch after the other, until the connection is closed."""
    _end_with(worker)
    note_worker()
    data = os.pread(function_fd, size, 0)
    os.close(function_fd)
    udf = deserialize_udf(data, udf_digest(data))
    activate(udf.modules)
    memory = _OwnMemory()
    prepare: Callable[[pa.RecordBatch], Any] | None = None
    with socket.socket(fileno=connection_fd) as connection:
        with contextlib.suppress(Exception):  # tried again for a batch, which is told what is wrong
            prepare = ending_copies(_prepare_of, udf.func, udf.arg_type)
        while True:
            try:
                batch, unused = _loaded(_receive_parts(connection)[0])
            except (EOFError, ConnectionError):
                return
            memory.unused.update(unused)
            block: _Block | None = None
            try:
                prepare = prepare or ending_copies(_prepare_of, udf.func, udf.arg_type)
                answer = ending_copies(prepare, batch)
                parts = _parts(answer)
                if sum(part.nbytes for part in parts[1:]) >= _MIN_SHARED_BYTES:
                    parts, block = memory.take_over(parts)
                del answer
            except Exception as error:  # noqa: BLE001  the user's function may raise anything
                parts, block = _parts(_failed(error)), None
            sys.stdout.flush()
            _send_parts(connection, parts, [] if block is None else [block.file.fileno()])


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Shared memory, by way of a file that has no name."""

    number: int
    file: IO[bytes]
    memory: np.ndarray[Any, Any]


class _OwnMemory:
    """The blocks that a process has shared with its worker."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._numbers = itertools.count()
        self._dropped: set[int] = set()
        """Blocks that were let go of, which the worker has not been told yet."""
        self.unused: set[int] = set()
        """Blocks that the worker is done with."""

    def take_over(self, parts: Sequence[memoryview]) -> tuple[list[memoryview], _Block | None]:
        """Copy the buffers of an answer; return the answer without them, and a block if it is new.

        Blocks that were too small are let go of when another one is made.
        """
        data, *buffers = parts
        places, end = [], 0
        for buffer in buffers:
            places.append((end, end + buffer.nbytes))
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        fitting = [number for number in self.unused if len(self._blocks[number].memory) >= end]
        if fitting:
            block = self._blocks[min(fitting, key=lambda n: len(self._blocks[n].memory))]
        else:
            # Before another one is made: there may be no room for both. Where there is none for
            # that either, the next answer tells the worker.
            for number in self.unused:
                self._blocks.pop(number).file.close()
            self._dropped |= self.unused
            self.unused = set()
            block = self._made(int(_SPARE * end))
        for (start, stop), buffer in zip(places, buffers, strict=True):
            block.memory[start:stop] = np.frombuffer(buffer, np.uint8)
        answer = _Shared(
            block=block.number,
            places=tuple(places),
            data=bytes(data),
            dropped=tuple(self._dropped),
        )
        made = _parts(answer)
        self._blocks[block.number] = block
        self.unused.discard(block.number)
        self._dropped = set()
        return made, None if fitting else block

    def _made(self, size: int) -> _Block:
        file = _memory_file(size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        return _Block(next(self._numbers), file, memory)


def _memory_file(size: int) -> IO[bytes]:
    """A file of so many bytes that has no name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("geneva"), "wb+")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115  whoever asked for it closes it
    file.truncate(size)
    return file


def _failed(error: Exception) -> _Failed:
    """What was raised; in words where it is an error that can't travel."""
    trace = traceback.format_exc()
    try:
        pickle.loads(cloudpickle.dumps(error))  # noqa: S301  it was made here
    except Exception:  # noqa: BLE001  whatever its class makes of that
        error = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
    return _Failed(error, trace)


def _end_with(worker: int) -> None:
    """End this process when its worker has ended, whatever `prepare` is doing."""

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="geneva-watch", daemon=True).start()


def _prepare_of(func: Any, arg_type: UDFArgType) -> Callable[[pa.RecordBatch], Any]:
    assert isinstance(func, StatefulCallable)
    prepare = func.made_to_prepare().prepare
    return lambda batch: prepare(*as_parameters(batch, arg_type))


# ------------------------------------------------------------------------------------- messages


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors on the CPU as arrays, whose values lie beside the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if is_plain_tensor(obj) and not obj.requires_grad:
            with contextlib.suppress(TypeError):  # on a device, or of a type that numpy lacks
                return _tensor, (obj.numpy(),)
        return super().reducer_override(obj)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    return importlib.import_module("torch").from_numpy(array)


def _parts(value: Any) -> list[memoryview]:
    """A value as bytes: its pickle, and large buffers beside it."""
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _Pickler(data, protocol=5, buffer_callback=buffers.append).dump(value)
    return [data.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _loaded(parts: Sequence[bytearray | memoryview]) -> Any:
    """The value again, over the same buffers."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  of this very function's process


def _send_parts(
    connection: socket.socket, parts: Sequence[memoryview], fds: Sequence[int] = ()
) -> None:
    sizes = [part.nbytes for part in parts]
    socket.send_fds(connection, [_COUNT.pack(len(sizes))], fds)
    connection.sendall(b"".join(map(_COUNT.pack, sizes)))
    for part in parts:
        connection.sendall(part)


def _receive_parts(connection: socket.socket) -> tuple[list[bytearray], list[int]]:
    """The parts of the next message, and files that come with it."""
    head, fds, _, _ = socket.recv_fds(connection, _COUNT.size, 1)
    if not head:
        raise EOFError
    (count,) = _COUNT.unpack(head)
    sizes = struct.unpack(f"<{count}Q", _read(connection, _COUNT.size * count))
    return [_read(connection, size) for size in sizes], fds


def _read(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        got = connection.recv_into(rest)
        if not got:
            raise EOFError
        rest = rest[got:]
    return found
