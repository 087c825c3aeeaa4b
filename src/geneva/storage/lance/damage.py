"""Files that can't be read or written: what Lance raises then, under one name."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

from geneva.errors import GenevaError

Item = TypeVar("Item")

_FULL_SIGNS = ("no space left on device", "disk quota exceeded")
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

    A damaged file can panic Lance's reader, and PanicException is no Exception.
    """
    known = (OSError, ValueError, RuntimeError, KeyError, pa.ArrowException)
    if isinstance(error, GenevaError):
        return False
    return isinstance(error, known) or type(error).__name__ == "PanicException"


def damage_reason(error: BaseException) -> str:
    """What is wrong with a file, in one line and without places in Lance's own source."""
    text = str(error).partition("\n")[0]
    return _RUST_PLACE.sub("", text).strip() or type(error).__name__


def is_storage_full(error: BaseException) -> bool:
    """Whether something could not be written because no space is left."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _FULL_SIGNS)
