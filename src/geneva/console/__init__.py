"""The console: web pages of a database's tables, views, jobs and errors.

It listens on this machine only, and reads only, unless it is started with a token.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from geneva.errors import MissingDependencyError, UserInputError
from geneva.render.text import how_to_install

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["app", "serve"]

_INSTALL = f"The console needs starlette and uvicorn: {how_to_install('console')}"
_PATIENCE_SECONDS = 2
"""How long open live pages are waited for at the end."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
"""The names of this machine that nobody else can reach."""


def app(
    db_uri: str,
    storage_options: Mapping[str, str] | None = None,
    token: str | None = None,
    *,
    hosts: Iterable[str] = LOOPBACK,
) -> Starlette:
    """The console of a database as an ASGI application.

    Args:
        db_uri: The database.
        storage_options: Keys and settings of its object store; none of them reaches a page.
        token: What the console asks for; with it, jobs can be cancelled.
        hosts: The names that it answers under (the Host header), so that no other site's page
            can reach it through a name of its own.
    """
    try:
        from geneva.console.routes import make_app
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{_INSTALL} ({error}).") from error
    return make_app(str(db_uri), storage_options, token, hosts)


def _announce(address: str) -> None:
    sys.stderr.write(f"Console: {address} (Ctrl-C ends it)\n")
    sys.stderr.flush()


def serve(
    db_uri: str,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
    hosts: Iterable[str] = (),
    announce: Callable[[str], None] = _announce,
) -> None:
    """Serve the console until it is interrupted.

    Args:
        db_uri: The database.
        host: Where to listen. Anything but this machine itself takes a token.
        port: The port; 0: any free one.
        token: What the console asks for; with it, jobs can be cancelled.
        storage_options: Keys and settings of the object store.
        hosts: More names that it answers under.
        announce: Is told the address; by default it is written to standard error.
    """
    try:
        import uvicorn

        from geneva.console.guard import answered_hosts, is_loopback
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{_INSTALL} ({error}).") from error
    if not is_loopback(host) and token is None:
        raise UserInputError(
            f"The console would be open to everybody who can reach {host}: give it a token, or "
            "leave it on 127.0.0.1."
        )
    made = app(db_uri, storage_options, token, hosts=answered_hosts(host, hosts))
    config = uvicorn.Config(
        made, log_level="warning", server_header=False, timeout_graceful_shutdown=_PATIENCE_SECONDS
    )
    with _listen(host, port) as listener, suppress(KeyboardInterrupt):
        address = _address(host, listener.getsockname()[1])
        announce(address)
        uvicorn.Server(config).run(sockets=[listener])


def _address(host: str, port: int) -> str:
    """Where a browser finds the console; of one that listens everywhere, by the machine's name."""
    if host in ("0.0.0.0", "::"):
        return f"http://127.0.0.1:{port}, from elsewhere http://{socket.gethostname()}:{port}"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserInputError(
            f"The console can't listen at {host}, port {port} ({error.strerror}): take another."
        ) from error
