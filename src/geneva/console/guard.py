"""What every request passes: which hosts are answered, who may read, and an answer's headers."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import traceback
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from geneva.console import LOOPBACK
from geneva.errors import UserInputError
from geneva.render.plain import plain

_LOG = logging.getLogger("geneva.console")

COOKIE = "geneva_console"
ANY_ADDRESS = "*"
"""Stands among the hosts for every IP address."""
WILDCARDS = frozenset({"0.0.0.0", "::"})
"""What a console is bound to that listens at all addresses of its machine."""
_MIN_TOKEN = 16
_OPEN_PATHS = ("/login", "/static/")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Access:
    """Who may do what: without a token everybody reads and nobody changes anything."""

    def __init__(self, token: str | None) -> None:
        """Keep the token's digest, and draw the secret that a browser is given for it."""
        if token is not None and len(token) < _MIN_TOKEN:
            raise UserInputError(
                f"The console's token has to have at least {_MIN_TOKEN} characters; make one "
                'with: python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        self._digest = None if token is None else _digest(token)
        self._session = secrets.token_urlsafe(32)
        self._form_key = secrets.token_bytes(32)

    @property
    def needs_token(self) -> bool:
        """Whether the console was started with a token: then it asks for it, and can cancel."""
        return self._digest is not None

    @property
    def session(self) -> str:
        """What a browser that knew the token is given as a cookie."""
        return self._session

    def is_token(self, text: str) -> bool:
        """Whether this is the token; comparing takes the same time for every text."""
        return self._digest is not None and hmac.compare_digest(_digest(text), self._digest)

    def knows(self, headers: Headers) -> bool:
        """Whether a request comes with the token, or from a browser that gave it."""
        return not self.needs_token or self._has_cookie(headers) or self._has_bearer(headers)

    def form_key(self, action: str) -> str:
        """What a form has to carry to be believed; only the console's own pages know it."""
        return hmac.new(self._form_key, action.encode(), hashlib.sha256).hexdigest()

    def may_change(self, request: Request, action: str, form_key: str) -> bool:
        """Whether a request may change something: token, and no other site's doing."""
        if not self.needs_token or not is_same_origin(request.headers):
            return False
        if self._has_bearer(request.headers):
            return True  # No browser adds this header by itself.
        fitting = hmac.compare_digest(form_key.encode(), self.form_key(action).encode())
        return self._has_cookie(request.headers) and fitting

    def _has_bearer(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given.strip())

    def _has_cookie(self, headers: Headers) -> bool:
        name = cookie_name(headers)
        given = [value for key, value in _cookies(headers) if key == name]
        own = self._session.encode()
        return any(hmac.compare_digest(value.encode(), own) for value in given)


def cookie_name(headers: Headers) -> str:
    """The name of the console's cookie, by its port: a browser sends a host's to all of its ports.

    So that two consoles on one machine don't take each other's place.
    """
    port = headers.get("host", "").rpartition("]")[2].rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def _cookies(headers: Headers) -> Iterator[tuple[str, str]]:
    """Names and values. Those of others on this host may have any form, and are in nobody's way."""
    for header in headers.getlist("cookie"):
        for pair in header.split(";"):
            name, _, value = pair.partition("=")
            yield name.strip(), value.strip().strip('"')


def is_same_origin(headers: Headers) -> bool:
    """Whether a request does not come from another site's page, as far as the browser says."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host", "")


def host_name(header: str) -> str:
    """The name in a Host header: without its port, brackets and case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    return host.lower() in LOOPBACK


def answered_hosts(bound: str, more: Iterable[str] = ()) -> frozenset[str]:
    """The names under which a console that is bound to `bound` answers."""
    own = set() if is_loopback(bound) else {bound, socket.gethostname(), ANY_ADDRESS}
    return LOOPBACK | {name.lower() for name in (*own, *more)} - WILDCARDS


def is_address(name: str) -> bool:
    """Whether a name is the number of a machine, and of one that can be called."""
    try:
        return not ip_address(name).is_unspecified
    except ValueError:
        return False


class Guard:
    """Stands before the routes: hosts, the token, headers, and no stack trace for anybody."""

    def __init__(self, app: ASGIApp, access: Access, hosts: frozenset[str]) -> None:
        """Guard `app`."""
        self._app, self._access, self._hosts = app, access, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, or hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def guarded(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        try:
            await (refusal or self._app)(scope, receive, guarded)
        except Exception:
            what = f"{scope['method']} {plain(scope['path'])}"
            _LOG.error("%s\n%s", what, plain(traceback.format_exc(), lines=True))
            if began:
                raise
            sorry = PlainTextResponse("Something went wrong; the console's log says what.", 500)
            await sorry(scope, receive, guarded)

    def _answers(self, name: str) -> bool:
        """Whether this is a name of the console's.

        Another site's page reaches it through a name of its own, never through a number: numbers
        are answered wherever the console is open to other machines.
        """
        return name in self._hosts or (ANY_ADDRESS in self._hosts and is_address(name))

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        if not self._answers(host_name(headers.get("host", ""))):
            return PlainTextResponse("This console doesn't answer under that name.", 421)
        if self._access.knows(headers) or path.startswith(_OPEN_PATHS):
            return None
        if "text/html" in headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return PlainTextResponse("This console wants its token.", 401)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
