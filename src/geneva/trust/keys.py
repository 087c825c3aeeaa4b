"""Keys that sign declarations, and those that check them. They are in files or in the environment.

A key is one line, `KIND NAME BASE64`: `hmac-sha256` (a shared secret that signs and checks),
`ed25519-private` (signs) or `ed25519-public` (checks). A file may have several, and comments.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from geneva.errors import MissingDependencyError, UserInputError
from geneva.render.text import how_to_install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HMAC, PRIVATE, PUBLIC = "hmac-sha256", "ed25519-private", "ed25519-public"
_LINE = re.compile(rf"({HMAC}|{PRIVATE}|{PUBLIC})\s+(\S+)\s+(\S+)")
_MIN_SECRET_BYTES = 16


class VerifyingKey(Protocol):
    """Checks what a key of the same name has signed."""

    @property
    def name(self) -> str:
        """What the key is called; a signature says which one made it."""

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether this key's owner has signed the message."""


class SigningKey(VerifyingKey, Protocol):
    """Signs, and checks what it has signed."""

    def sign(self, message: bytes) -> bytes:
        """Sign a message."""


@dataclass(frozen=True, slots=True)
class HmacKey:
    """A shared secret: who can check can sign, too."""

    name: str
    secret: bytes = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """Sign a message."""
        return hmac.digest(self.secret, message, hashlib.sha256)

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether somebody with the secret has signed the message."""
        return hmac.compare_digest(self.sign(message), signature)


@dataclass(frozen=True, slots=True)
class Ed25519PublicKey:
    """Checks, and can't sign."""

    name: str
    data: bytes

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether the owner of the private key has signed the message."""
        from cryptography.exceptions import InvalidSignature

        public = _ed25519().Ed25519PublicKey.from_public_bytes(self.data)
        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def line(self) -> str:
        """The key as it stands in a file."""
        return _line(PUBLIC, self.name, self.data)


@dataclass(frozen=True, slots=True)
class Ed25519Key:
    """A private key."""

    name: str
    data: bytes = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """Sign a message."""
        return bytes(self._private().sign(message))

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether this key has signed the message."""
        return self.public().verify(message, signature)

    def public(self) -> Ed25519PublicKey:
        """The key to hand out."""
        return Ed25519PublicKey(self.name, self._private().public_key().public_bytes_raw())

    def _private(self) -> Ed25519PrivateKey:
        private: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(self.data)
        return private


Key = HmacKey | Ed25519Key | Ed25519PublicKey


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"Keys of kind ed25519 need cryptography: {how_to_install('sign')} (those of kind "
            "hmac-sha256 need nothing)."
        ) from error
    return ed25519


def new_key(name: str, *, shared: bool = False) -> tuple[str, str]:
    """Make a key; return the line to keep and the line to hand out, the same for a shared one."""
    if not re.fullmatch(r"\S+", name):
        raise UserInputError(f"{name!r} can't be a key's name: it is one word.")
    data = secrets.token_bytes(32)
    if shared:
        return _line(HMAC, name, data), _line(HMAC, name, data)
    return _line(PRIVATE, name, data), Ed25519Key(name, data).public().line()


def read_keys(given: str) -> tuple[Key, ...]:
    """The keys of a text: lines of keys, or the path of a file of such lines."""
    what, text = "The text of the key", given
    if not any(_LINE.match(line.strip()) for line in given.splitlines()):
        try:
            text = Path(given).expanduser().read_text()
        except (OSError, ValueError) as error:
            # It is not repeated: it may be a secret that was mistyped.
            why = getattr(error, "strerror", None) or type(error).__name__
            raise UserInputError(
                "What was given as a key is neither KIND NAME BASE64 nor a file of such lines that "
                f"can be read ({why})."
            ) from None
        what = f"The key file {given!r}"
    lines = [line.strip() for line in text.splitlines()]
    return tuple(_read_line(line, what) for line in lines if line and not line.startswith("#"))


def read_signing_key(given: str) -> SigningKey:
    """The one key of a text or file that signs."""
    found = [key for key in read_keys(given) if not isinstance(key, Ed25519PublicKey)]
    if len(found) != 1:
        raise UserInputError(
            f"A signing key was asked for, and {len(found)} were given: one line of kind {HMAC} "
            f"or {PRIVATE} (make one with: geneva trust keygen NAME)."
        )
    return found[0]


def _read_line(line: str, what: str) -> Key:
    found = _LINE.fullmatch(line)
    try:
        data = base64.b64decode(found[3], validate=True) if found is not None else b""
    except (binascii.Error, ValueError):
        data = b""
    # The line is not repeated: it may be a secret.
    if found is None or (found[1] == HMAC and len(data) < _MIN_SECRET_BYTES):
        raise UserInputError(f"{what} has a line that is not: KIND NAME BASE64.")
    if found[1] != HMAC and len(data) != 32:
        raise UserInputError(
            f"{what} has a line of kind {found[1]} that is not 32 bytes of base64."
        )
    kinds: dict[str, type[Key]] = {HMAC: HmacKey, PRIVATE: Ed25519Key, PUBLIC: Ed25519PublicKey}
    return kinds[found[1]](found[2], data)


def _line(kind: str, name: str, data: bytes) -> str:
    return f"{kind} {name} {base64.b64encode(data).decode()}"
