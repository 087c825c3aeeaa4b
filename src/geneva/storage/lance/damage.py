"""Files that can't be read or written: what Lance raises then, under one name."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TypeVar

import pyarrow as pa

from geneva.errors import (
    GenevaError,
    StorageFullError,
    StorageUnavailableError,
    TableNotFoundError,
)
from geneva.model.uris import local_path

Item = TypeVar("Item")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def _of_rust(numbers: Iterable[int]) -> re.Pattern[str]:
    number = f"({'|'.join(map(str, numbers))})"
    return re.compile(
        rf"[^'\"\n]*LanceError\(IO\): [^'\"\n]*\(os error {number}\)"
        rf"|[^'\n]*Os {{ code: {number}, kind: "  # of a panic, or of a namespace
    )


_OF_RUST: dict[tuple[int, ...], re.Pattern[str]] = {
    numbers: _of_rust(numbers) for numbers in (_FULL, _REFUSED)
}
"""What Lance's Rust says itself: the system's number, and no value in quotes before it."""
_WRITERS = {
    *("geneva", "lance", "lancedb", "lance_namespace", "pyarrow"),
    "deprecation",  # some of LanceDB's methods are called through it
    *sys.stdlib_module_names,
}
"""Packages whose code runs where something is written to a store."""
_RUST_PLACE = re.compile(r",?\s*(at )?/\S+\.rs:\d+:\d+")


class Damaged(Exception):
    """A file could not be read because of what is in it, or because it is gone."""


def reading(items: Iterable[Item]) -> Iterator[Item]:
    """The same items; Damaged in place of whatever is raised where one can't be read."""
    source = iter(items)
    while True:
        try:
            item = next(source)
        except StopIteration:
            return
        except BaseException as error:
            if not is_damage(error):
                raise
            raise Damaged(damage_reason(error)) from error
        yield item


def is_damage(error: BaseException) -> bool:
    """Whether a file could not be read because of what is in it, or because it is gone.

    A damaged file can panic Lance's reader.
    """
    known = (OSError, ValueError, RuntimeError, KeyError, pa.ArrowException)
    if isinstance(error, GenevaError):
        return False
    return isinstance(error, known) or is_panic(error)


def is_missing(error: BaseException) -> bool:
    """Whether something is not there, as opposed to a store that can't be reached right now."""
    return isinstance(error, FileNotFoundError | TableNotFoundError) or (
        isinstance(error, OSError | ValueError) and "not found" in str(error).lower()
    )


def is_file_gone(error: BaseException) -> bool:
    """Whether Lance was at work on a file that is not there (any more)."""
    return is_damage(error) and (is_missing(error) or "not found" in str(error).lower())


def is_panic(error: BaseException) -> bool:
    """Whether Lance's Rust panicked. The exception is no Exception, and can't be imported."""
    return type(error).__name__ == "PanicException"


def damage_reason(error: BaseException) -> str:
    """What is wrong with a file, in one line and without places in Lance's own source."""
    text = str(error).partition("\n")[0]
    return _RUST_PLACE.sub("", text).strip() or type(error).__name__


def is_storage_full(error: BaseException) -> bool:
    """Whether something could not be written because no space is left, or none that may be used."""
    return _is_answer(error, _FULL)


def _is_answer(error: BaseException, numbers: tuple[int, ...]) -> bool:
    """Whether the system has answered Lance, or Python, with one of these numbers.

    What is quoted is a value of the user's, whatever it says. An error of their code that came
    through Arrow is a "Python exception".
    """
    if isinstance(error, OSError) and error.errno in numbers:
        return True
    text = str(error)
    return _OF_RUST[numbers].match(text) is not None and "Python exception" not in text


def unwritable(
    error: BaseException, doing: str, kept: str, places: Iterable[str] | None = None
) -> GenevaError | None:
    """What to say where a store has no space, or refuses a file; None: it is another case.

    `doing` is what could not be done, `kept` what is so afterwards. `places`: the folders of the
    store; what is refused elsewhere is another case. None: it can be nowhere else.
    """
    if isinstance(error, GenevaError):
        return None
    if is_storage_full(error):
        return StorageFullError(
            f"No space is left for {doing}: {damage_reason(error)}. Make room and run again: "
            f"{kept}."
        )
    is_ours = places is None or any(_is_about(error, place) for place in places)
    if is_ours and _is_answer(error, _REFUSED):
        return StorageUnavailableError(
            f"The store does not allow {doing}: {damage_reason(error)}. Give this process the "
            f"right to read or write there, and run again: {kept}."
        )
    return None


def _is_about(error: BaseException, place: str) -> bool:
    """Whether an error names a local folder, or something in it: Lance's and Python's do."""
    folder = local_path(place)
    if folder is None:
        return False
    names = {re.escape(str(path)) for path in (folder, folder.resolve())}
    return re.search(rf"(?<![\w.-])({'|'.join(names)})(?![\w.-])", str(error)) is not None


@contextmanager
def writing(doing: str) -> Iterator[None]:
    """Say in a sentence why something can't be written: no space is left, or it is not allowed.

    An error that names a file is Python's own. Lance writes here, and so it is about a file of the
    user's, such as one that rows are read from. What the user's code raises is left alone as well.
    """
    try:
        yield
    except Exception as error:
        said = unwritable(error, doing, "nothing was lost")
        names_a_file = getattr(error, "filename", None) is not None
        if said is None or names_a_file or _is_of_users_code(error):
            raise
        raise said from error


def _is_of_users_code(error: BaseException) -> bool:
    """Whether it was raised in, or below, code that is not of what writes: rows, or a callback."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(module.partition(".")[0] not in _WRITERS for module in modules)
