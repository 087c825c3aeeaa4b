"""A fingerprint of what a function means, not of how or where it is written.

It covers the function's code, defaults, closure values and the globals it refers to, through the
user's own functions, classes and modules; what is installed (site-packages, the standard library)
counts by name. Code is compared by its syntax tree where the source can be found AND compiles to
the very bytecode of the function (so a stale file can't lie), else by its bytecode. Hence it is
equal across processes, hash seeds, line moves, file names, comments, docstrings and annotations,
and across Python versions where the source is at hand.

Not followed: what a function reaches through getattr, eval or files, and state inside installed
objects that can't be pickled (locks, clients, sessions: these count by their type).
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import logging
import pathlib
import re
import types
import uuid
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.code_meaning import (
    canonical_source,
    code_digest,
    imported_sources,
    node_digest,
    verified_tree,
)
from geneva.user_code import (
    closure_of,
    globals_of,
    is_module,
    is_user_file,
    is_user_module,
)


def fingerprint(callable_: Any, data_type: pa.DataType, call_shape: str = "") -> str:
    """Return 32 hex digits that are equal where the column's values must be equal."""
    digest = node_digest("udf", str(data_type), call_shape, _Walk().digest(callable_))
    return digest.hex()[:32]


# repr says all there is to these, and says it the same everywhere.
_BY_REPR = (
    *(type(None), bool, float, complex, range, slice, type(...), type(NotImplemented)),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)


# What Python writes into a class by itself, or what says where and how it was written.
_CLASS_NOISE = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__"),
        *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"),
        *("__firstlineno__", "__static_attributes__", "__classdictcell__", "__type_params__"),
        *("__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__"),
        *("__dataclass_fields__", "__dataclass_params__", "__signature__", "__slotnames__"),
    }
)


class _Walk:
    """One walk over everything a function refers to; knows where it is, so that cycles end."""

    def __init__(self) -> None:
        self._path: dict[int, int] = {}  # id of what is being looked at -> depth
        self._done: dict[int, tuple[Any, bytes]] = {}  # keeps the object: ids are reused

    def digest(self, value: Any) -> bytes:
        """Return the digest of any value, function, class or object."""
        if type(value) in _BY_REPR:
            return node_digest(type(value).__name__, repr(value))
        if type(value) is int:
            return node_digest("int", format(value, "x"))
        if type(value) in (str, bytes):
            return node_digest(type(value).__name__, value)
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._path:
            return node_digest("cycle", str(self._path[id(value)]))
        self._path[id(value)] = len(self._path)
        try:
            digest = self._compound(value)
        finally:
            del self._path[id(value)]
        self._done[id(value)] = (value, digest)
        return digest

    def _compound(self, value: Any) -> bytes:
        for handler in (self._container, self._code, self._data):
            digest = handler(value)
            if digest is not None:
                return digest
        return self._object(value)

    def _all(self, values: Iterable[Any]) -> list[bytes]:
        return [self.digest(value) for value in values]

    def _named(self, pairs: Iterable[tuple[str, Any]]) -> bytes:
        return node_digest(
            "named", *(node_digest(n, self.digest(v)) for n, v in sorted(pairs, key=_first))
        )

    def _container(self, value: Any) -> bytes | None:
        kind = type(value)
        if kind in (list, tuple):
            return node_digest(kind.__name__, *self._all(value))
        if isinstance(value, (set, frozenset)):
            return node_digest("set", self.digest(kind), *sorted(self._all(value)))
        if kind in (dict, types.MappingProxyType, collections.defaultdict):
            # In order: a function may go by the first entry that matches.
            pairs = [node_digest("", self.digest(k), self.digest(v)) for k, v in value.items()]
            factory = getattr(value, "default_factory", None)
            return node_digest("dict", self.digest(factory), *pairs)
        return None

    # -- code

    def _code(self, value: Any) -> bytes | None:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return node_digest("method", self.digest(value.__func__), self.digest(value.__self__))
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return node_digest("partial", *self._all(parts))
        if isinstance(value, (staticmethod, classmethod)):
            return node_digest(type(value).__name__, self.digest(value.__func__))
        if isinstance(value, property):
            return node_digest("property", *self._all((value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return node_digest("property", self.digest(value.func))
        if isinstance(value, types.ModuleType):
            name = "user" if is_user_module(value.__name__) else value.__name__
            return node_digest("module", name)
        meaning = getattr(type(value), "__geneva_meaning__", None)
        if meaning is not None:
            return self.digest(meaning(value))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.digest(value.__wrapped__)
        if inspect.isroutine(value) or isinstance(value, np.ufunc):
            owner = getattr(value, "__self__", None)
            bound = b"" if owner is None or is_module(owner) else self.digest(owner)
            return node_digest("installed", _qualified_name(value), bound)
        return None

    def _function(self, function: types.FunctionType) -> bytes:
        if not is_user_module(function.__module__) and "<locals>" not in function.__qualname__:
            return node_digest("installed", _qualified_name(function))
        code = function.__code__
        tree = verified_tree(code, self.digest)
        # A wrapper made by an installed decorator is its code and what it wraps: the globals of
        # its module are that module's own affair.
        return node_digest(
            "function",
            code_digest(code, self.digest)
            if tree is None
            else node_digest("source", canonical_source(tree)),
            self.digest(function.__defaults__ or ()),
            self.digest(function.__kwdefaults__ or {}),
            self._named(closure_of(function)),
            self._named(globals_of(function).items() if _is_user_code(code) else ()),
            *sorted(imported_sources(code, function.__globals__.get("__package__") or "")),
        )

    def _class(self, cls: type) -> bytes:
        if not is_user_module(cls.__module__):
            return node_digest("installed", _qualified_name(cls))
        attributes = {
            name: value
            for name, value in vars(cls).items()
            if name not in _CLASS_NOISE
            and not name.startswith("__pydantic_")
            and not _is_generated(cls, name, value)
        }
        if issubclass(cls, enum.Enum):
            attributes = {n: v for n, v in attributes.items() if _is_method(v)}
            attributes["enum members"] = [(m.name, m.value) for m in cls]
        if dataclasses.is_dataclass(cls):
            attributes["dataclass fields"] = [
                (f.name, f.default, f.default_factory, f.init) for f in dataclasses.fields(cls)
            ]
        if hasattr(cls, "__pydantic_fields__"):
            attributes["pydantic fields"] = repr(cls.__pydantic_fields__)
        metaclass = (type(cls),) if is_user_module(type(cls).__module__) else ()
        bases = self._all((*cls.__bases__, *metaclass))
        return node_digest(
            "class", cls.__name__, node_digest("bases", *bases), self._named(attributes.items())
        )

    # -- values

    def _data(self, value: Any) -> bytes | None:
        if isinstance(value, enum.Enum):
            return node_digest("member", type(value).__name__, value.name, self.digest(value.value))
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return node_digest("numpy", str(array.shape), self.digest(array.tolist()))
            data = np.ascontiguousarray(array).tobytes()
            return node_digest("numpy", array.dtype.str, str(array.dtype), str(array.shape), data)
        if isinstance(value, (np.dtype, pa.DataType, pa.Field, pa.Schema)):
            return node_digest("type", str(value))
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return node_digest("arrow", str(value.type), self.digest(value.to_pylist()))
        if isinstance(value, pa.Scalar):
            return node_digest("arrow", str(value.type), self.digest(value.as_py()))
        if isinstance(value, (pa.RecordBatch, pa.Table)):
            return node_digest("arrow", str(value.schema), self.digest(value.to_pylist()))
        if isinstance(value, pathlib.PurePath):
            return node_digest("path", str(value))
        if isinstance(value, re.Pattern):
            return node_digest("regex", self.digest(value.pattern), str(value.flags))
        if isinstance(value, (memoryview, bytearray)):
            return node_digest("bytes", bytes(value))
        if isinstance(value, logging.Logger):
            return node_digest("logger")  # it is named after its module
        return None

    def _object(self, value: Any) -> bytes:
        """Take an object by what pickle would keep of it, or by its class if that is nothing."""
        cls = type(value)
        if cls.__module__ in ("typing", "types") and cls is not types.SimpleNamespace:
            return node_digest("annotation", repr(value))
        if cls.__module__ in ("weakref", "_weakref") or isinstance(value, weakref.ref):
            return node_digest("opaque", _qualified_name(cls))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - locks, clients, sessions: they raise what they like
            return node_digest("opaque", self.digest(cls))
        if isinstance(reduced, str):
            return node_digest("installed", _qualified_name(cls), reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        items, pairs = list(items or ()), list(pairs or ())
        return node_digest("object", *self._all((cls, make, arguments, state, items, pairs)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _qualified_name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}"


# What @dataclass and NamedTuple write into a class: its fields say the same, in every version.
_GENERATED = frozenset(
    {
        *("__init__", "__new__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"),
        *("__replace__", "__getnewargs__"),
    }
)


def _is_generated(cls: type, name: str, value: Any) -> bool:
    if type(value).__name__ == "_tuplegetter":  # a field of a NamedTuple
        return True
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is None or name not in _GENERATED:
        return False
    is_record = dataclasses.is_dataclass(cls) or hasattr(cls, "_field_defaults")
    return is_record and (code.co_filename == "<string>" or not _is_user_code(code))


def _is_user_code(code: types.CodeType) -> bool:
    return code.co_filename.startswith("<") or is_user_file(code.co_filename)


def _is_method(value: Any) -> bool:
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    return isinstance(value, kinds) and is_user_module(getattr(value, "__module__", "") or "x")
