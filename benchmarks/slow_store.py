"""An S3 server in which every request takes its time, and is counted: moto behind a door.

with slow_store(0.03) as store:
    geneva.connect(store.uri, storage_options=store.options)
    store.requests()  # {"GET": 12, "PUT": 7, ...} since the last time
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_BUCKET = "bench"
_COUNTS = "/__counts__"
_MOST = "/__most_at_once__"


@dataclass(frozen=True, slots=True)
class SlowStore:
    """A bucket on the server."""

    endpoint: str

    @property
    def uri(self) -> str:
        return f"s3://{_BUCKET}/db"

    @property
    def options(self) -> dict[str, str]:
        return {
            "aws_access_key_id": "bench",
            "aws_secret_access_key": "bench-secret",
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    def requests(self) -> Counter[str]:
        """Requests since the last time somebody asked, by method and kind of object."""
        with urllib.request.urlopen(self.endpoint + _COUNTS) as answer:
            return Counter(json.load(answer))

    def most_at_once(self) -> int:
        """The most requests that were under way at the same time, since somebody asked."""
        with urllib.request.urlopen(self.endpoint + _MOST) as answer:
            return int(json.load(answer))


@contextmanager
def slow_store(seconds: float) -> Iterator[SlowStore]:
    """Start a server whose requests take `seconds` each, with an empty bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_store", str(port), str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 * 1024 * 1024)},
    )
    try:
        store = SlowStore(f"http://127.0.0.1:{port}")
        _wait_until_it_answers(port)
        made = urllib.request.Request(f"{store.endpoint}/{_BUCKET}", method="PUT")
        urllib.request.urlopen(made).close()
        store.requests()
        yield store
    finally:
        server.kill()
        server.wait()


def _wait_until_it_answers(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the S3 server doesn't answer (is moto[server] installed?)")


# ------------------------------------------------------------------------------- in the server


class _Door:
    """Counts requests and makes each of them wait."""

    def __init__(self, app: Callable[..., Iterable[bytes]], seconds: float) -> None:
        self._app, self._seconds = app, seconds
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._under_way = self._most = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path in (_COUNTS, _MOST):
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._counted() if path == _COUNTS else self._busiest()).encode()]
        with self._lock:
            self._counts[f"{environ['REQUEST_METHOD']} {_kind(path)}"] += 1
            self._under_way += 1
            self._most = max(self._most, self._under_way)
        try:
            time.sleep(self._seconds)
            return self._app(environ, start)
        finally:
            with self._lock:
                self._under_way -= 1

    def _counted(self) -> Counter[str]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def _busiest(self) -> int:
        with self._lock:
            most, self._most = self._most, 0
        return most


def _kind(path: str) -> str:
    """Which part of a database a path is in."""
    if "/_geneva/" in path:
        return "_geneva"
    for part in ("data", "_versions", "_transactions", "_checkpoints", "_udfs", "_deletions"):
        if f"/{part}/" in path or path.endswith(f"/{part}"):
            return part
    return "list" if path.count("/") < 2 else "other"


def _serve(port: int, seconds: float) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, run_simple

    # Connections stay open, as those of a real store do.
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    app = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", port, _Door(app, seconds), threaded=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
