"""Values that are used and never shown: keys of object stores, environment variables."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from geneva.errors import UserInputError
from geneva.render.text import a_type

_MIN_SECRET = 4
"""Characters of the shortest option that is taken out of texts: shorter ones are in any word."""
_MIN_LINE = 8
"""Characters of the shortest line of a longer value that is taken out of texts."""
_HARMLESS = frozenset({"true", "false"})
_MAY_BE_ESCAPED = re.compile(r"(\\+|[^A-Za-z0-9_.~-])")
_BACKSLASH = r"(?:\\|%(?:25)*5c)"
_LETTERS = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\v": "v", "\a": "a"}


class Secrets(Mapping[str, str]):
    """A mapping that shows in no repr, message, log or plain pickle, such as storage options."""

    __slots__ = ("_hidden", "_options")

    def __init__(self, options: Mapping[str, str | bool] | None = None) -> None:
        """Keep a copy of `options`."""
        given = _mapping("storage_options", options)
        self._options = {str(key): _option_text(key, value) for key, value in given.items()}
        self._hidden: tuple[_HiddenValue, ...] | None = None

    def __getitem__(self, key: str) -> str:
        """Return one option."""
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the option names."""
        return iter(self._options)

    def __len__(self) -> int:
        """Return how many options there are."""
        return len(self._options)

    def __repr__(self) -> str:
        """Say how many there are, and nothing of what they are."""
        return f"<{len(self)} storage options>"

    def __hash__(self) -> int:
        """Hash by content, so that records which hold options can be cache keys."""
        return hash(frozenset(self._options.items()))

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        return isinstance(other, Secrets) and self._options == other._options

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle compressed: workers need the options, but none is to be read in a pickle."""
        text = "\0".join(part for pair in self._options.items() for part in pair)
        return _open_secrets, (zlib.compress(text.encode()) if self._options else b"",)

    def redact(self, text: str) -> str:
        """A text without the values of the options; any of them may be a key."""
        if self._hidden is None:
            self._hidden = tuple(map(_HiddenValue, _to_hide(self._options.values())))
        for value in self._hidden:
            text = value.redact(text)
        return text

    def plain(self) -> dict[str, str] | None:
        """The options as the storage libraries want them; None when there are none."""
        return dict(self._options) or None


class _HiddenValue:
    """Finds a value as it is, and as `repr`, JSON and URLs write it, however often escaped."""

    __slots__ = ("_part", "_parts", "_pattern")

    def __init__(self, value: str) -> None:
        """Compile nothing yet: most values are in no text."""
        self._parts = _MAY_BE_ESCAPED.split(value)
        self._part = max(self._parts[::2], key=len)
        self._pattern: re.Pattern[str] | None = None

    def redact(self, text: str) -> str:
        """A text without the value."""
        if self._part not in text:  # which is in each of its forms
            return text
        if self._pattern is None:
            parts = enumerate(self._parts)
            forms = (_written(part) if i % 2 else re.escape(part) for i, part in parts)
            self._pattern = re.compile("".join(forms))
        return self._pattern.sub("***", text)


def _to_hide(values: Iterable[str]) -> list[str]:
    """What is taken out of texts, longest first: values, and the lines of those that have several.

    Lines are printed one by one, and indented where they are part of a group of errors.
    """
    found = {value for value in values if len(value) >= _MIN_SECRET}
    lines = {line.strip() for value in found for line in value.splitlines()}
    found |= {line for line in lines if len(line) >= _MIN_LINE}
    return sorted(found - _HARMLESS, key=len, reverse=True)


def _written(character: str) -> str:
    r"""A pattern for one character, or for backslashes: `%2F`, `\n`, `\u00e9` are escapes."""
    if character[0] == "\\":
        return f"(?i:{_BACKSLASH}+)"
    coded, code = character.encode("utf-8", "surrogatepass"), ord(character)
    wide = character.encode("utf-16-be", "surrogatepass").hex()
    url = "".join(f"%(?:25)*{byte:02x}" for byte in coded)
    escapes = [
        f"{_BACKSLASH}*(?:{re.escape(character)}|{url})",  # quotes and slashes have one
        "".join(f"{_BACKSLASH}+x{byte:02x}" for byte in coded),
        "".join(f"{_BACKSLASH}+u{wide[at : at + 4]}" for at in range(0, len(wide), 4)),
        f"{_BACKSLASH}+(?:x{code:02x}|U{code:08x})",
    ]
    if character in _LETTERS:
        escapes.append(f"{_BACKSLASH}+{_LETTERS[character]}")
    if character == " ":  # in the query of a URL
        escapes.append(r"(?:\+|%(?:25)*2b)")
    return f"(?i:{'|'.join(escapes)})"


def redacted(text: str, hidden: Iterable[Secrets]) -> str:
    """A text without the values of several mappings."""
    for secrets in hidden:
        text = secrets.redact(text)
    return text


def _mapping(what: str, given: Any) -> Mapping[Any, Any]:
    """What was given, or nothing; an error that shows no value where it is something else."""
    if given is not None and not isinstance(given, Mapping):
        raise UserInputError(
            f"{what} must be a mapping of names to values, not {type(given).__name__}."
        )
    return given or {}


def _option_text(key: object, value: object) -> str:
    if not isinstance(value, str | bool | int | float):
        raise UserInputError(
            f"storage_options: the value of {key!r} must be a string, not {type(value).__name__}."
        )
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked_variables(env: Mapping[Any, Any] | None) -> Mapping[str, str]:
    """Refuse what can't be environment variables; the message shows no value."""
    env = _mapping("env", env)
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UserInputError(f"env: {name!r} can't be the name of an environment variable.")
        if not isinstance(value, str) or "\0" in value:
            raise UserInputError(
                f"env: the value of {name!r} must be a string, not {a_type(value)}."
            )
    return env


_KEY_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "credential",
        "credentials",
        "key",
        "passphrase",
        "passwd",
        "password",
        "secret",
        "token",
    }
)


def names_a_key(variable: str) -> bool:
    """Whether an environment variable is named as if its value were secret, such as HF_TOKEN."""
    words = re.split(r"[^a-z]+", variable.lower())
    return bool(_KEY_WORDS.intersection(words)) and "public" not in words


def _open_secrets(sealed: bytes) -> Secrets:
    parts = zlib.decompress(sealed).decode().split("\0") if sealed else []
    return Secrets(dict(zip(parts[::2], parts[1::2], strict=True)))
