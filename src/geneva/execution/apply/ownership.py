"""Whether anybody but us has the memory of what a function returned.

A function may keep an array that it has returned, and write the next values into it. So what it
returns is copied before the next call, unless nobody else can reach it: CPython counts who does.
"""

from __future__ import annotations

import sys
import weakref
from functools import cache
from typing import Any

import numpy as np

from geneva.execution.apply.tensors import is_plain_tensor


def is_only_here(box: list[Any]) -> bool:
    """Whether a list is all that refers to its one item, an array or tensor, and to its memory.

    A view counts with what it is a view of, and keeps it: so that may not be much larger. Where
    memory comes from elsewhere, somebody else has it.
    """
    if sys.getrefcount(box[0]) > _ALONE or _is_watched(box[0]):
        return False
    if is_plain_tensor(box[0]):
        return _is_only_tensor(box)
    return type(box[0]) is np.ndarray and _is_only_array(box)


def _is_watched(thing: Any) -> bool:
    """Whether somebody has a weak reference: as long as we keep the thing, that leads to it."""
    return weakref.getweakrefcount(thing) > 0


def _count(box: list[Any]) -> int:
    return sys.getrefcount(box[0])


_ALONE = _count([np.empty(0)])
"""What is counted of an array that one list, or one view, refers to."""
_MAX_KEPT = 2
"""How many times its own size an array may keep of memory."""


def _is_only_array(box: list[np.ndarray[Any, Any]]) -> bool:
    array, max_bytes = box[0], _MAX_KEPT * box[0].nbytes
    if not array.flags.aligned or array.dtype.hasobject:  # objects may be anybody's
        return False
    while type(array.base) is np.ndarray:
        if sys.getrefcount(array.base) > _ALONE or _is_watched(array.base):
            return False
        array = array.base
    return array.base is None and bool(array.flags.owndata) and array.nbytes <= max_bytes


def _is_only_tensor(box: list[Any]) -> bool:
    """The same of a tensor. Not of one on a GPU, or with a gradient, which keep much else."""
    if not box[0].is_cpu or box[0].requires_grad:
        return False
    try:
        fits = box[0].untyped_storage().nbytes() <= _MAX_KEPT * box[0].nbytes
        return fits and _holders(box) == _holders_of_nobody()
    except (AttributeError, RuntimeError):  # a release that counts otherwise
        return False


def _holders(box: list[Any]) -> tuple[Any, ...]:
    """Who has a tensor's memory: other tensors, arrays, capsules of DLPack, other processes.

    Memory that torch did not allocate itself (`from_numpy`), or that numpy has seen (`.numpy()`,
    also of an array that is gone), can't be resized.
    """
    storage = box[0].untyped_storage()
    return (
        box[0]._use_count(),
        sys.modules["torch"]._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
        storage.resizable(),
        storage.is_shared(),
    )


@cache
def _holders_of_nobody() -> tuple[Any, ...]:
    """The same of memory that only a tensor has."""
    return _holders([sys.modules["torch"].empty(1, device="cpu")])
