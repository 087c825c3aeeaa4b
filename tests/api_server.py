"""A service on this machine that answers HTTP, counts its calls, and refuses too many of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Service:
    """What was asked of the service, and when."""

    port: int = 0
    refuse_first: int = 0
    """So many calls are refused with 429."""
    retry_after: str | None = "0.2"
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(**options: object) -> Iterator[Service]:
    service = Service(**options)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with service.lock:
                refused = len(service.refused) < service.refuse_first
                (service.refused if refused else service.accepted).append(time.monotonic())
            self.send_response(429 if refused else 200)
            if refused and service.retry_after is not None:
                self.send_header("Retry-After", service.retry_after)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
