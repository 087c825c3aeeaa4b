"""Whether anybody but us has the memory of what a function returned.

A function may keep an array that it has returned, and write the next values into it. So what it
returns is copied before the next call, unless nobody else can reach it: CPython counts who does.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np


def is_only_here(box: list[Any]) -> bool:
    """Whether a list is all that refers to its one item, an array, and to the memory of it.

    A view counts with what it is a view of, and keeps it: so that may not be much larger. Where
    memory comes from elsewhere, somebody else has it.
    """
    if type(box[0]) is not np.ndarray or sys.getrefcount(box[0]) > _ALONE or _is_watched(box[0]):
        return False
    array, max_bytes = box[0], _MAX_KEPT * box[0].nbytes
    if not array.flags.aligned:
        return False
    while type(array.base) is np.ndarray:
        if sys.getrefcount(array.base) > _ALONE or _is_watched(array.base):
            return False
        array = array.base
    if array.base is not None:
        return _is_only_tensor(array, max_bytes)
    return bool(array.flags.owndata) and array.nbytes <= max_bytes


_MAX_KEPT = 2
"""How many times its own size an array may keep of memory."""


def _is_watched(thing: Any) -> bool:
    """Whether somebody has a weak reference: as long as we keep the thing, that leads to it."""
    return weakref.getweakrefcount(thing) > 0


def _count(box: list[Any]) -> int:
    return sys.getrefcount(box[0])


_ALONE = _count([np.empty(0)])
"""What is counted of an array that one list, or one view, refers to."""


def _is_only_tensor(array: np.ndarray[Any, Any], max_bytes: int) -> bool:
    """Whether an array is all that is left of a tensor of torch, and of its memory."""
    torch = sys.modules.get("torch")
    if torch is None or type(array.base) is not torch.Tensor:
        return False
    if sys.getrefcount(array.base) > _ALONE or _is_watched(array.base):
        return False
    try:
        storage = array.base.untyped_storage()  # type: ignore[union-attr]  # a tensor
        # Of the tensor, and of the object that stands for its memory here.
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2
        return bool(alone and storage.nbytes() <= max_bytes)
    except (AttributeError, RuntimeError):  # a release that counts otherwise
        return False
