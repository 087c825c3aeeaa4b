"""Processes that run a class's `prepare`, each for one thread of the worker that asks it.

A process has an object of its own, on which `setup_prepare` was called and `setup` was not: the
model stays in the worker. Both sides speak in pickles, with large buffers beside them. The process
ends when its worker closes the connection, or dies, in the midst of a batch too.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pyarrow as pa

from geneva.execution.apply.by_batch import arguments
from geneva.execution.apply.compact import compact_batch
from geneva.udf.call import StatefulCallable
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf_digest
from geneva.udf.shipped_modules import activate

_START = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({fd}, {pid})"
_COUNT = struct.Struct("<Q")
_PATIENCE_SECONDS = 5.0
_WATCH_SECONDS = 1.0
_CHUNK_BYTES = 65_536


class PrepareDied(Exception):
    """The process has ended in the midst of a batch, whatever ended it."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What `prepare` raised, and where in the user's code."""

    error: BaseException
    trace: str


class _RemoteTrace(Exception):
    """Shows, as the cause of an error, where it was raised in the other process."""


class PrepareProcess:
    """A process that runs the `prepare` of one function."""

    def __init__(self, udf: UDF) -> None:
        """Start it."""
        own, theirs = socket.socketpair()
        start = _START.format(path=sys.path, module=__name__, fd=theirs.fileno(), pid=os.getpid())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._printing = threading.Thread(target=self._print, name="geneva-print", daemon=True)
        self._printing.start()
        self._connection = own
        self._send(serialize_udf(udf))

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Return what `prepare` gives for a batch, or raise what it raises."""
        self._send(batch)
        try:
            answer = _receive(self._connection)
        except (EOFError, OSError):
            raise PrepareDied from None
        if isinstance(answer, _Failed):
            raise answer.error from _RemoteTrace(answer.trace)
        return answer

    def close(self) -> None:
        """End it, and wait for its end; one that goes on is ended all the same."""
        self._connection.close()
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

    def _send(self, value: Any) -> None:
        try:
            _send(self._connection, value)
        except OSError:
            raise PrepareDied from None


def serve(fd: int, worker: int) -> None:
    """The process: prepare one batch after the other, until the connection is closed."""
    _end_with(worker)
    with socket.socket(fileno=fd) as connection:
        data = bytes(_receive(connection))
        udf = deserialize_udf(data, udf_digest(data))
        activate(udf.modules)
        prepare: Callable[[pa.RecordBatch], Any] | None = None
        while True:
            try:
                batch = _receive(connection)
            except EOFError:
                return
            try:
                prepare = prepare or _prepare_of(udf)
                answer = prepare(batch)
                parts = _parts(answer)
            except Exception as error:  # noqa: BLE001  the user's function may raise anything
                parts = _parts(_failed(error))
            sys.stdout.flush()
            _send_parts(connection, parts)


def _failed(error: Exception) -> _Failed:
    """What was raised; in words where it is an error that can't travel."""
    trace = traceback.format_exc()
    try:
        pickle.loads(cloudpickle.dumps(error))  # noqa: S301  it was made here
    except Exception:  # noqa: BLE001  whatever its class makes of that
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failed(error, trace)


def _end_with(worker: int) -> None:
    """End this process when its worker has ended, whatever `prepare` is doing."""

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="geneva-watch", daemon=True).start()


def _prepare_of(udf: UDF) -> Callable[[pa.RecordBatch], Any]:
    assert isinstance(udf.func, StatefulCallable)
    prepare = udf.func.made_to_prepare().prepare
    return lambda batch: prepare(*arguments(compact_batch(batch), udf.arg_type))


def _send(connection: socket.socket, value: Any) -> None:
    _send_parts(connection, _parts(value))


def _parts(value: Any) -> list[memoryview]:
    """A value as bytes: its pickle, and large buffers beside it."""
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [memoryview(data), *(buffer.raw() for buffer in buffers)]


def _send_parts(connection: socket.socket, parts: list[memoryview]) -> None:
    sizes = [part.nbytes for part in parts]
    connection.sendall(b"".join(_COUNT.pack(number) for number in (len(sizes), *sizes)))
    for part in parts:
        connection.sendall(part)


def _receive(connection: socket.socket) -> Any:
    (count,) = _COUNT.unpack(_read(connection, _COUNT.size))
    sizes = struct.unpack(f"<{count}Q", _read(connection, _COUNT.size * count))
    data, *buffers = (_read(connection, size) for size in sizes)
    return pickle.loads(data, buffers=buffers)  # noqa: S301  from this function's own process


def _read(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        got = connection.recv_into(rest)
        if not got:
            raise EOFError
        rest = rest[got:]
    return found
