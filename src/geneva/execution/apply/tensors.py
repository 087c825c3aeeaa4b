"""Tensors of torch as numpy arrays. Torch itself is not imported: who has tensors has it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    kind = _tensor_type()
    return kind is not None and isinstance(value, kind)


def is_plain_tensor(value: Any) -> bool:
    """Whether it is just that, and not of a class derived from it."""
    kind = _tensor_type()
    return kind is not None and type(value) is kind


def _tensor_type() -> type | None:
    # A module that another thread is about to import has not all of its names.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind if isinstance(kind, type) else None


def numpy_of(value: Any) -> npt.NDArray[Any]:
    """A value that offers to be a numpy array, as one; of whatever kind that is.

    Of a tensor its values count: it may be on a GPU, or be part of a gradient's history. Numpy has
    no bfloat16; each of its values is one of float32.
    """
    if is_tensor(value):
        if value.requires_grad or not value.is_cpu:
            value = value.detach().cpu()
        if value.dtype is sys.modules["torch"].bfloat16:
            value = value.float()
        if is_plain_tensor(value):
            numbers: npt.NDArray[Any] = value.numpy()
            return numbers
    return np.asanyarray(value)
