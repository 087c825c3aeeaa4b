"""What a function returned, taken before it is called again: it may use the same object for it."""

from __future__ import annotations

import copy
import datetime
import decimal
import sys
import uuid
from typing import Any

import numpy as np
import pyarrow as pa

_UNCHANGING = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        decimal.Decimal,
        uuid.UUID,
        *(kind for kind in np.sctypeDict.values() if not issubclass(kind, np.void)),
    }
)
"""Types whose values nobody can change."""


def taken(value: Any) -> Any:
    """A value that no later call can change: the same, or a copy."""
    return value if type(value) in _UNCHANGING else _copied(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return value.copy() if _UNCHANGING.issuperset(map(type, value)) else [*map(taken, value)]
    if kind is dict:
        return {name: taken(item) for name, item in value.items()}
    if kind is tuple:
        return value if _UNCHANGING.issuperset(map(type, value)) else (*map(taken, value),)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy()
    if isinstance(value, pa.Array):
        return _own(value)
    if isinstance(value, pa.RecordBatch):
        return pa.RecordBatch.from_arrays([*map(_own, value.columns)], schema=value.schema)
    if isinstance(value, pa.Table):
        return pa.Table.from_batches([*map(_copied, value.to_batches())], value.schema)
    if _is_tensor(value):
        return value.detach().clone()
    try:
        if isinstance(value, memoryview):
            flat: Any = memoryview(value.tobytes())
            return flat.cast(value.format, value.shape)
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  an iterator, a file, anything: it is looked at later, as it is
        return value


def _own(array: pa.Array) -> pa.Array:
    return pa.concat_arrays([array, array[:0]])


def _is_tensor(value: Any) -> bool:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(kind, type) and isinstance(value, kind)
