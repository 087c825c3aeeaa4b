"""A server on this machine that answers like OpenAI's: embeddings, chats, and "later"."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Provider:
    """Where it listens, what it was asked, and what it is to answer first."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Statuses and headers of the next answers; then it answers well."""


@contextmanager
def provider() -> Iterator[Provider]:
    """Serve until the end of the block."""
    state = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append({"path": self.path, **body})
            state.keys.add(self.headers["Authorization"])
            if state.refusals:
                status, headers = state.refusals.pop(0)
                return self._send(status, {"error": "not now"}, headers)
            return self._send(200, answer(self.path, body), {})

        def _send(self, status: int, document: Any, headers: dict[str, str]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(path: str, body: dict[str, Any]) -> Any:
    if path.endswith("/embeddings"):
        size = body.get("dimensions", 3)
        vectors = [
            {"index": i, "embedding": [float(len(text)), *([0.0] * (size - 1))]}
            for i, text in enumerate(body["input"])
        ]
        return {"data": vectors[::-1]}  # in whatever order
    content = body["messages"][0]["content"]
    said = content if isinstance(content, str) else content[1]["image_url"]["url"]
    return {"choices": [{"message": {"content": f"about {said}"}}]}
