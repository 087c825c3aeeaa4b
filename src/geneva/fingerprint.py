"""A fingerprint of what a function means, not of how or where it is written.

It follows what the function can reach: its code, defaults, closure values and the globals it
refers to, through the user's own functions, classes and objects. What is installed counts by
name. Where it can't know what is used, it takes all: a module that is passed around counts with
everything in it, a file that is imported in a function's body counts as a whole. A change that
can affect values is not missed.

Code counts by its bytecode in a normal form (`geneva.code_meaning`), so the fingerprint describes
what is loaded, and is equal for a file, `python -c`, stdin, `exec` and a zip archive, across
processes, hash seeds, line moves, file names, comments and docstrings, and for nearly all code
across Python versions.

Not counted, because calls change it: globals that the functions it calls assign, containers that
they fill (memos), `cached_property` values. Not followed: what is reached through getattr, eval
or files, and state inside installed objects that can't be pickled (locks, clients, sessions:
these count by their type).
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import logging
import pathlib
import re
import reprlib
import sys
import types
import uuid
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geneva.class_meaning import attributes_that_count, is_typed_dict, member_attributes
from geneva.code_meaning import code_digest, node_digest
from geneva.imported_files import imported_files
from geneva.references import (
    assigned_attributes,
    assigned_globals,
    cells_of,
    closure_of,
    globals_of,
    state_behind,
)
from geneva.user_code import (
    is_installed,
    is_module,
    is_user_class,
    is_user_code,
    is_user_module,
)
from geneva.version_parts import Kind, VersionPart


def fingerprint(callable_: Any, data_type: pa.DataType, call_shape: str = "") -> str:
    """Return 32 hex digits that are equal where the column's values must be equal."""
    return fingerprint_parts(callable_, data_type, call_shape)[0]


def fingerprint_parts(
    callable_: Any, data_type: pa.DataType, call_shape: str = ""
) -> tuple[str, tuple[VersionPart, ...]]:
    """Return the fingerprint, and what it was made of."""
    walk = _Walk(callable_)
    means = walk.labelled("", callable_)
    digest = node_digest("udf", walk.digest(data_type), call_shape, means)
    return digest.hex()[:32], tuple(walk.parts)


# repr says all there is to these, and says it the same everywhere.
_BY_REPR = (
    *(type(None), bool, float, complex, range, type(...), type(NotImplemented)),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.date, datetime.timedelta, datetime.timezone),
)


# Functions and methods that are written in C.
_NATIVE = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc),
)


class _Walk:
    """One walk over everything a function refers to; knows where it is, so that cycles end.

    It also writes down what it meets (`parts`), so that an explanation can't say anything else.
    """

    def __init__(self, root: Any) -> None:
        self.parts: list[VersionPart] = []
        self._state = state_behind(root)
        self._path: dict[int, int] = {}  # id of what is being looked at -> depth
        self._done: dict[int, tuple[Any, bytes]] = {}  # keeps the object: ids are reused
        self._label: str | None = None  # how the next value is reached, if that is to be shown
        self._depth = 0

    # -- what is shown

    def labelled(self, label: str, value: Any) -> bytes:
        """Return the digest of a value, and write down how it is reached."""
        self._label = label
        digest = self.digest(value)
        if self._label is not None:  # a plain value, or one that was met before
            is_code = isinstance(value, (types.FunctionType, type, types.ModuleType))
            self._note("value", f"{value.__name__}, see above" if is_code else _short(value))
        return digest

    def _note(self, kind: Kind, text: str) -> None:
        """Write down what is at hand."""
        self.parts.append(VersionPart(self._depth, self._label or "", kind, text))
        self._label = None

    def _note_value(self, value: Any) -> None:
        """Write down a value, if it is one with a name and not an item of another one."""
        if self._label is not None:
            self._note("value", _short(value))

    def _by_name(self, value: Any) -> bytes:
        """Take something installed by its name, and write it down unless it is part of Python."""
        name = f"module {value.__name__}" if is_module(value) else _qualified_name(value)
        if self._label is not None or not name.startswith(("builtins.", "copyreg.")):
            self._note("installed", name)
        return node_digest("installed", name)

    def _named(self, kind: str, pairs: Iterable[tuple[str, Any]]) -> bytes:
        self._depth += 1
        digests = [
            node_digest(name, self.labelled(f"{kind} {name}", value))
            for name, value in sorted(pairs, key=_first)
        ]
        self._depth -= 1
        return node_digest("named", *digests)

    def _all(self, values: Iterable[Any]) -> list[bytes]:
        self._depth += 1
        digests = [self.digest(value) for value in values]
        self._depth -= 1
        return digests

    # -- the walk

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
        for handler in (self._code, self._container, self._data):
            digest = handler(value)
            if digest is not None:
                return digest
        return self._object(value)

    def _container(self, value: Any) -> bytes | None:
        kind = type(value)
        if id(value) in self._state.memos:
            self._note("memo", _type_name(value))
            return node_digest("memo", _qualified_name(kind))
        if kind in (list, tuple, slice):
            self._note_value(value)
            items = (value.start, value.stop, value.step) if isinstance(value, slice) else value
            return node_digest(kind.__name__, *self._all(items))
        if kind in (set, frozenset):
            self._note_value(value)
            return node_digest("set", kind.__name__, *sorted(self._all(value)))
        if kind in (dict, types.MappingProxyType, collections.defaultdict):
            self._note_value(value)
            # In order: a function may go by the first entry that matches.
            pairs = [node_digest("", *self._all(pair)) for pair in value.items()]
            factory = getattr(value, "default_factory", None)
            return node_digest("dict", self.digest(factory), *pairs)
        return None

    # -- code

    def _code(self, value: Any) -> bytes | None:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if is_module(value):
            return self._module(value)
        if isinstance(value, types.CodeType):
            self._note("function", f"code '{value.co_name}'")
            return code_digest(value, self.digest)
        meaning = getattr(type(value), "__geneva_meaning__", None)
        if meaning is not None:
            return self.digest(meaning(value))
        if isinstance(value, types.MethodType):
            return node_digest("method", *self._all((value.__func__, value.__self__)))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.digest(value.__wrapped__)
        if isinstance(value, types.CellType):
            return node_digest("cell", *self._all(_cell_contents(value)))
        if isinstance(value, _NATIVE) or _is_installed_routine(value):
            by_name = self._by_name(value)
            owner = getattr(value, "__self__", None)
            is_bound = owner is not None and not is_module(owner)
            return node_digest("bound", by_name, self.digest(owner)) if is_bound else by_name
        return self._wrapped(value)

    def _wrapped(self, value: Any) -> bytes | None:
        """Return the digest of an object around functions: what it holds, and its class."""
        tag: str
        parts: tuple[Any, ...]
        if isinstance(value, (functools.partial, functools.partialmethod)):
            tag, parts = "partial", (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            tag, parts = type(value).__name__, (value.__func__,)
        elif isinstance(value, property):
            tag, parts = "property", (value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.cached_property):
            tag, parts = "property", (value.func,)
        else:
            return None
        if not is_user_class(type(value)):
            own: tuple[Any, ...] = ()
        else:
            own = (type(value), getattr(value, "__dict__", {}))
        return node_digest(tag, type(value).__name__ if own else "", *self._all((*parts, *own)))

    def _function(self, function: types.FunctionType) -> bytes:
        if is_installed(function):
            return self._by_name(function)
        code, namespace = function.__code__, function.__globals__
        is_users = is_user_code(code, namespace)
        assigned = assigned_attributes(code)
        attributes = {
            name: value
            for name, value in vars(function).items()
            if name != "__wrapped__" and name not in assigned
        }
        self._note("function", _place(function))
        # A wrapper made by an installed decorator is known by its name and by what it wraps; the
        # globals of its module are that module's own affair.
        return node_digest(
            "function",
            code_digest(code, self.digest) if is_users else _installed_code_name(function),
            self._named("default", _defaults(function).items()),
            self._named("closure variable", self._closure(function)),
            self._named("global", self._globals(function) if is_users else ()),
            self._named("attribute", attributes.items()),
            self._imports(code, namespace) if is_users else b"",
        )

    def _closure(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        state = {name for name, cell in cells_of(function) if id(cell) in self._state.cells}
        return [(name, value) for name, value in closure_of(function) if name not in state]

    def _globals(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in globals_of(function).items()
            if not self._state.is_state(function, name.partition(".")[0])
        ]

    def _imports(self, code: types.CodeType, namespace: Mapping[str, Any]) -> bytes:
        """Digest the user's files that are imported inside a function."""
        files = imported_files(code, _package(namespace))
        digests = []
        self._depth += 1
        for name, content in sorted(files.items()):
            self._label = "import"
            if is_module(content):
                digest = self.digest(content)
            else:
                self._note("file", name)
                digest = (
                    code_digest(content, self.digest)
                    if isinstance(content, types.CodeType)
                    else self.digest(content)
                )
            digests.append(node_digest(name, digest))
        self._label = None
        self._depth -= 1
        return node_digest("imports", *digests)

    def _module(self, module: types.ModuleType) -> bytes:
        """Digest a module that is used as a whole: everything in it, as it is loaded."""
        if not is_user_module(module.__name__):
            return self._by_name(module)
        self._note("module", module.__name__)
        namespace = vars(module)
        own_code = [v.__code__ for v in namespace.values() if isinstance(v, types.FunctionType)]
        assigned = {name for code in own_code for name in assigned_globals(code)}
        attributes = {
            name: value
            for name, value in namespace.items()
            if name.isidentifier() and not name.startswith("__") and name not in assigned
        }
        own = self._all((type(module),)) if is_user_class(type(module)) else ()
        return node_digest("module", *own, self._named("its", attributes.items()))

    def _class(self, cls: type) -> bytes:
        if not is_user_class(cls):
            return self._by_name(cls)
        self._note("class", f"class {cls.__qualname__} of {cls.__module__}")
        if is_typed_dict(cls):
            return node_digest("typed dict", cls.__name__)
        metaclass = (type(cls),) if is_user_class(type(cls)) else ()
        bases = self._all((*cls.__bases__, *metaclass))
        attributes = attributes_that_count(cls)
        return node_digest(
            "class", cls.__name__, node_digest("bases", *bases), self._named("its", attributes)
        )

    # -- values

    def _data(self, value: Any) -> bytes | None:
        if isinstance(value, enum.Enum):
            self._note_value(value)
            extra = member_attributes(value)
            of_class, means, more = self._all((type(value), value.value, extra))
            return node_digest("member", of_class, str(value.name), means, more)
        if is_user_class(type(value)):
            return None  # the class has code of its own, and the object may have more state
        self._note_data(value)
        if type(value) is np.ndarray or isinstance(value, np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return node_digest("numpy", str(array.shape), self.digest(array.tolist()))
            data = np.ascontiguousarray(array).tobytes()
            return node_digest("numpy", array.dtype.str, str(array.dtype), str(array.shape), data)
        if isinstance(value, np.dtype):
            return node_digest("type", str(value))
        if isinstance(value, pathlib.PurePath):
            return node_digest("path", str(value))
        if isinstance(value, re.Pattern):
            return node_digest("regex", self.digest(value.pattern), str(value.flags))
        if isinstance(value, (memoryview, bytearray)):
            return node_digest("bytes", bytes(value))
        if isinstance(value, logging.Logger):
            return node_digest("logger")  # it is named after its module
        return self._arrow(value)

    def _note_data(self, value: Any) -> None:
        kinds = (np.ndarray, np.generic, np.dtype, pathlib.PurePath, re.Pattern, logging.Logger)
        if isinstance(value, kinds) or type(value).__module__.partition(".")[0] == "pyarrow":
            self._note_value(value)

    def _arrow(self, value: Any) -> bytes | None:
        if isinstance(value, pa.DataType):
            children = [value.field(i) for i in range(value.num_fields)]
            return node_digest("type", str(value), *self._all(children))
        if isinstance(value, pa.Field):
            parts = (value.type, dict(value.metadata or {}))
            return node_digest("field", value.name, str(value.nullable), *self._all(parts))
        if isinstance(value, pa.Schema):
            return node_digest("schema", *self._all((list(value), dict(value.metadata or {}))))
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return node_digest("arrow", *self._all((value.type, value.to_pylist())))
        if isinstance(value, pa.Scalar):
            return node_digest("arrow", *self._all((value.type, value.as_py())))
        if isinstance(value, (pa.RecordBatch, pa.Table)):
            return node_digest("arrow", *self._all((value.schema, value.to_pylist())))
        if isinstance(value, pc.FunctionOptions):
            name = _qualified_name(type(value))
            try:
                return node_digest("options", name, value.serialize().to_pybytes())
            except (pa.ArrowException, NotImplementedError):
                return node_digest("options", name, repr(value))
        return None

    def _object(self, value: Any) -> bytes:
        """Take an object by what pickle would keep of it, or by its class if that is nothing."""
        cls = type(value)
        origin = getattr(value, "__origin__", None)
        if cls.__module__ in ("typing", "types", "typing_extensions") and origin is not None:
            self._note_value(value)
            return node_digest("alias", *self._all((origin, getattr(value, "__args__", ()))))
        if cls.__module__ in ("typing", "types") and cls is not types.SimpleNamespace:
            self._note_value(value)
            return node_digest("annotation", repr(value))
        if cls.__module__ in ("weakref", "_weakref") or isinstance(value, weakref.ref):
            return self._opaque(value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some warn that they will not be picklable
                reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - locks, clients, sessions: they raise what they like
            return self._unpicklable(value)
        self._note_value(value)
        if isinstance(reduced, str):
            return node_digest("installed", _qualified_name(cls), reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        items, pairs = list(items or ()), list(pairs or ())
        parts = (cls, make, arguments, _without_cached(cls, state), items, pairs, _extra(value))
        return node_digest("object", *self._all(parts))

    def _opaque(self, value: Any) -> bytes:
        """Take an object by its type alone."""
        self._note("opaque", _qualified_name(type(value)))
        if not is_user_class(type(value)):
            return node_digest("opaque", _qualified_name(type(value)))
        return node_digest("opaque", *self._all((type(value),)))

    def _unpicklable(self, value: Any) -> bytes:
        """Take an object of the user's class by its attributes, any other by its type alone."""
        cls = type(value)
        if not is_user_class(cls) or not hasattr(value, "__dict__"):
            return self._opaque(value)
        self._note_value(value)
        state = _without_cached(cls, _own_attributes(value))
        return node_digest("opaque", *self._all((cls, state)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def _short(value: Any) -> str:
    """Return a value in a few characters, without running the user's code."""
    if isinstance(value, (str, bytes, int, float, complex, type(None), list, tuple, set, dict)):
        try:
            return " ".join(_REPR.repr(value).split())
        except Exception:  # noqa: BLE001 - an item's own repr may raise anything
            return _type_name(value)
    return f"{_type_name(value)} object"


def _type_name(value: Any) -> str:
    return type(value).__qualname__


def _place(function: types.FunctionType) -> str:
    code = function.__code__
    file = pathlib.PurePath(code.co_filename).name
    return f"function {function.__qualname__} ({file}:{code.co_firstlineno})"


def _qualified_name(value: Any) -> str:
    """Return a name that all Python versions agree on: `_io.open` is `builtins.open`."""
    given = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    name = str(given or _type_name(value))
    if getattr(sys.modules["builtins"], name, None) is value:
        return f"builtins.{name}"
    module = getattr(value, "__module__", None)
    if module is None or module.partition(".")[0].lstrip("_") not in sys.stdlib_module_names:
        return f"{module}.{name}"
    public = [part for part in module.split(".")[1:] if not part.startswith("_")]
    return ".".join([module.partition(".")[0].lstrip("_"), *public, name])


def _installed_code_name(function: types.FunctionType) -> str:
    module = function.__globals__.get("__name__")
    return f"installed {module}.{function.__code__.co_qualname}"


def _is_installed_routine(value: Any) -> bool:
    """Say whether this is a function of a C extension (Cython, pybind11), of whatever type."""
    return inspect.isroutine(value) and is_installed(value)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults by the parameter that has them."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def _package(namespace: Mapping[str, Any]) -> str:
    """Return the package that relative imports start from."""
    package = namespace.get("__package__")
    if isinstance(package, str):
        return package
    name = str(namespace.get("__name__", ""))
    return name if "__path__" in namespace else name.rpartition(".")[0]


def _cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _without_cached(cls: type, state: Any) -> Any:
    """Leave out of an object's state what a `cached_property` left there after a call."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
        return (_without_cached(cls, state[0]), state[1])
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if not _is_cached(cls, name)} or None


def _is_cached(cls: type, name: Any) -> bool:
    if not isinstance(name, str):
        return False
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _extra(value: Any) -> Any:
    """Return attributes that pickle forgets: of the user's own kinds of arrays and paths."""
    forgetful = (np.ndarray, pathlib.PurePath, logging.Logger)
    if not is_user_class(type(value)) or not isinstance(value, forgetful):
        return None
    return _own_attributes(value)


def _own_attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, logging.Logger):
        for name in vars(logging.getLogger("geneva")):
            attributes.pop(name, None)
    return attributes
