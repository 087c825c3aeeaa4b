"""What data means: arrays, Arrow objects, paths, patterns; and the state of any other object."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.udf.identity.code_meaning import node_digest
from geneva.udf.identity.user_code import is_user_class, qualified_name

Digest = Callable[[Any], bytes]
"""Digests a part of the data."""


def data_digest(value: Any, digest: Digest) -> bytes | None:
    """Return the digest of data of an installed type; None for what is not known here."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return node_digest("numpy", str(array.shape), digest(array.tolist()))
        data = np.ascontiguousarray(array).tobytes()
        return node_digest("numpy", array.dtype.str, str(array.dtype), str(array.shape), data)
    if isinstance(value, np.dtype):
        return node_digest("type", str(value))
    if isinstance(value, pathlib.PurePath):
        return node_digest("path", str(value))
    if isinstance(value, re.Pattern):
        return node_digest("regex", digest(value.pattern), str(value.flags))
    if isinstance(value, (memoryview, bytearray)):
        return node_digest("bytes", bytes(value))
    if isinstance(value, logging.Logger):
        return node_digest("logger")  # it is named after its module
    return _arrow_digest(value, digest)


def _arrow_digest(value: Any, digest: Digest) -> bytes | None:
    if isinstance(value, pa.DataType):
        children = [digest(value.field(i)) for i in range(value.num_fields)]
        return node_digest("type", str(value), *children)
    if isinstance(value, pa.Field):
        parts = (digest(value.type), digest(dict(value.metadata or {})))
        return node_digest("field", value.name, str(value.nullable), *parts)
    if isinstance(value, pa.Schema):
        return node_digest("schema", digest(list(value)), digest(dict(value.metadata or {})))
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return node_digest("arrow", digest(value.type), digest(value.to_pylist()))
    if isinstance(value, pa.Scalar):
        return node_digest("arrow", digest(value.type), digest(value.as_py()))
    if isinstance(value, (pa.RecordBatch, pa.Table)):
        return node_digest("arrow", digest(value.schema), digest(value.to_pylist()))
    if isinstance(value, pc.FunctionOptions):
        name = qualified_name(type(value))
        try:
            return node_digest("options", name, value.serialize().to_pybytes())
        except (pa.ArrowException, NotImplementedError):
            return node_digest("options", name, repr(value))
    return None


def without_cached(cls: type, state: Any) -> Any:
    """Leave out of an object's state what a call left there: `cached_property`, `np.vectorize`."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
        return (without_cached(cls, state[0]), state[1])
    if not isinstance(state, dict):
        return state
    if issubclass(cls, np.vectorize):
        state = {**state, "_ufunc": {}}
    return {name: value for name, value in state.items() if not _is_cached(cls, name)} or None


def _is_cached(cls: type, name: Any) -> bool:
    if not isinstance(name, str):
        return False
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def forgotten_by_pickle(value: Any) -> dict[str, Any] | None:
    """Return attributes that pickle forgets: of the user's own kinds of arrays and paths."""
    forgetful = (np.ndarray, pathlib.PurePath, logging.Logger)
    if not is_user_class(type(value)) or not isinstance(value, forgetful):
        return None
    return own_attributes(value)


_OF_EVERY_LOGGER = frozenset(vars(logging.root))


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the user's class, also those in slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ()) if is_user_class(cls) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    skipped = _OF_EVERY_LOGGER if isinstance(value, logging.Logger) else ()
    return {name: kept for name, kept in attributes.items() if name not in skipped}


def of_the_process() -> dict[str, Any]:
    """Return what describes where a process runs, not what a function means."""
    known = {"sys.argv": sys.argv, "sys.path": sys.path, "sys.modules": sys.modules}
    return {"os.environ": os.environ, **known}
