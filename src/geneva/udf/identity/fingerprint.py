"""A fingerprint of what a function means, not of how or where it is written.

It follows what the function can reach: its code, defaults, closure values and the globals it
refers to, through the user's own functions, classes and objects. What is installed counts by
name. Where it can't know what is used, it takes all: a module that is passed around counts with
everything in it, a file that is imported in a function's body counts as a whole. A change that
can affect values is not missed.

Code counts by its bytecode in a normal form (`code_meaning`), so the fingerprint describes
what is loaded, and is equal for a file, `python -c`, stdin, `exec` and a zip archive, across
processes, hash seeds, line moves, file names, comments and docstrings, and for nearly all code
across Python versions.

Not counted, because calls change it: globals that the functions it calls assign, containers that
they fill (memos), `cached_property` values. Not followed: data in files and behind URLs, the code
of what is installed, and state inside installed objects that can't be pickled (locks, clients,
sessions: these count by their type).
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import gc
import sys
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from geneva.render.values import constant_text
from geneva.udf.identity.call_state import state_behind
from geneva.udf.identity.class_meaning import (
    annotated_by,
    annotations_that_count,
    attributes_that_count,
    is_typed_dict,
    member_attributes,
    metadata_that_counts,
)
from geneva.udf.identity.code_meaning import code_digest, node_digest
from geneva.udf.identity.deep_walk import deep_and_quiet
from geneva.udf.identity.imported_files import ImportedFiles
from geneva.udf.identity.references import (
    cells_of,
    closure_of,
    defaults_of,
    globals_of,
    own_assigned_attributes,
    what_is_in,
)
from geneva.udf.identity.user_code import (
    compiled_package_digest,
    is_found_by_name,
    is_function_of_module,
    is_installed,
    is_installed_routine,
    is_module,
    is_user_class,
    is_user_code,
    is_user_module,
    module_facts,
    qualified_name,
)
from geneva.udf.identity.value_meaning import (
    data_digest,
    forgotten_by_pickle,
    of_the_process,
    own_attributes,
    without_cached,
)
from geneva.udf.identity.version_parts import Kind, VersionPart, place_text


def fingerprint(callable_: Any, data_type: pa.DataType, call_shape: str = "") -> str:
    """Return 32 hex digits that are equal where the column's values must be equal."""
    return fingerprint_parts(callable_, data_type, call_shape)[0]


def fingerprint_parts(
    callable_: Any, data_type: pa.DataType, call_shape: str = ""
) -> tuple[str, tuple[VersionPart, ...]]:
    """Return the fingerprint, and what it was made of."""
    with deep_and_quiet:
        walk = _Walk(callable_, data_type)
        means = walk.labelled("", callable_)
        digest = node_digest("udf", walk.digest(data_type), call_shape, means)
    return digest.hex()[:32], tuple(walk.parts)


# repr shows all there is to these, the same everywhere.
_BY_REPR = (
    *(type(None), bool, float, complex, range, type(...), type(NotImplemented)),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.date, datetime.timedelta, datetime.timezone),
)


_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


# Functions and methods that are written in C.
_NATIVE = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, np.ufunc),
    *_SLOTS,
)


# A function that calls one of these may get at anything in its module.
_SEE_EVERYTHING = (globals, eval, exec)


class _Walk:
    """One walk over everything a function refers to; knows where it is, so that cycles end.

    It also writes down what it meets (`parts`), so that an explanation can't say anything else.
    """

    def __init__(self, root: Any, data_type: pa.DataType) -> None:
        self.parts: list[VersionPart] = []
        self._output = tuple(_types_in(data_type))
        self._state = state_behind(root)
        self._of_the_process = {id(value): name for name, value in of_the_process().items()}
        self._path: dict[int, int] = {}  # id of what is being looked at -> depth
        self._done: dict[int, tuple[Any, bytes]] = {}  # keeps the object: ids are reused
        self._files = ImportedFiles()
        self._file_digests: dict[str, bytes] = {}
        self._label: str | None = None  # how the next value is reached, if that is to be shown
        self._depth = 0

    # -- what is shown

    def labelled(self, label: str, value: Any) -> bytes:
        """Return the digest of a value, and write down how it is reached."""
        self._label = label
        digest = self.digest(value)
        if self._label is not None:  # a plain value, or one that was met before
            is_code = isinstance(value, (types.FunctionType, type, types.ModuleType))
            self._note("value", f"{value.__name__}, see above" if is_code else constant_text(value))
        return digest

    def _note(self, kind: Kind, text: str) -> None:
        """Write down what is at hand."""
        self.parts.append(VersionPart(self._depth, self._label or "", kind, text))
        self._label = None

    def _note_value(self, value: Any) -> None:
        """Write down a value, if it is one with a name and not an item of another one."""
        if self._label is not None:
            self._note("value", constant_text(value))

    def _by_name(self, value: Any) -> bytes:
        """Take something installed by its name, and write it down unless it is part of Python."""
        name = f"module {value.__name__}" if is_module(value) else qualified_name(value)
        if self._label is not None or not name.startswith(("builtins.", "copyreg.")):
            self._note("installed", name)
        module = value.__name__ if is_module(value) else getattr(value, "__module__", None)
        compiled = _compiled_package_of(module)
        return node_digest("installed", name, *([compiled] if compiled is not None else []))

    def _named(self, kind: str, pairs: Iterable[tuple[str, Any]]) -> bytes:
        self._depth += 1
        digests = [
            node_digest(name, self.labelled(f"{kind} {name}", value))
            for name, value in sorted(pairs, key=_first)
        ]
        self._depth -= 1
        return node_digest("named", *digests)

    def _labelled(self, values: Mapping[str, Any]) -> list[bytes]:
        """Digest values in order, and write them down by their names, unless they are empty."""
        self._depth += 1
        digests = []
        for name, value in values.items():
            is_empty = isinstance(value, (tuple, dict)) and not value
            digests.append(self.digest(value) if is_empty else self.labelled(name, value))
        self._depth -= 1
        return digests

    def _state_of(self, state: Any) -> bytes:
        """Digest the state of an object; attributes are written down by name."""
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            return self._named("attribute", state.items())
        return node_digest("state", *self._all((state,)))

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
        if id(value) in self._of_the_process:
            self._note("installed", self._of_the_process[id(value)])
            return node_digest("installed", self._of_the_process[id(value)])
        if id(value) in self._state.memos:
            return self._memo(value)
        if kind in (list, tuple, slice):
            self._note_value(value)
            items = (value.start, value.stop, value.step) if isinstance(value, slice) else value
            return node_digest(kind.__name__, *self._all(items))
        if isinstance(value, (set, frozenset)):
            self._note_value(value)
            own = self._all((kind, without_cached(kind, own_attributes(value))))
            return node_digest("set", *own, *sorted(self._all(value)))
        if kind in (dict, types.MappingProxyType, collections.defaultdict):
            self._note_value(value)
            # In order: a function may go by the first entry that matches.
            pairs = [node_digest("", *self._all(pair)) for pair in value.items()]
            factory = getattr(value, "default_factory", None)
            return node_digest("dict", self.digest(factory), *pairs)
        return None

    def _memo(self, value: Any) -> bytes:
        """Take a container that calls fill by its type; a class of the user's has more to it."""
        self._note("memo", type(value).__qualname__)
        factory = self._all((getattr(value, "default_factory", None),))
        if not is_user_class(type(value)):
            return node_digest("memo", qualified_name(type(value)), *factory)
        return node_digest("memo", *factory, *self._all((type(value), own_attributes(value))))

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
            return self._meaning(meaning(value))
        if is_function_of_module(value):  # random.choice, a method of an object in the module
            return self._by_name(value)
        if isinstance(value, types.MethodType):
            self._note_value(value)
            parts = self._labelled({"of": value.__func__, "self": value.__self__})
            return node_digest("method", *parts)
        if isinstance(value, functools._lru_cache_wrapper):
            return self.digest(value.__wrapped__)
        if isinstance(value, types.CellType):
            return node_digest("cell", *self._all(_cell_contents(value)))
        if isinstance(value, np.ufunc) and not is_found_by_name(value):  # np.frompyfunc
            return node_digest("ufunc", str(value), *self._all(gc.get_referents(value)))
        if isinstance(value, _SLOTS) and is_user_class(value.__objclass__):
            return node_digest("slot", value.__name__)
        if isinstance(value, _NATIVE) or is_installed_routine(value):
            by_name = self._by_name(value)
            owner = getattr(value, "__self__", None)
            is_bound = owner is not None and not is_module(owner)
            return node_digest("bound", by_name, self.digest(owner)) if is_bound else by_name
        return self._wrapped(value)

    def _meaning(self, meaning: Any) -> bytes:
        """Digest what stands for a UDF: a function or object, or a class and its arguments."""
        if not isinstance(meaning, tuple):
            return self.digest(meaning)
        self._note("value", "an object, constructed in each worker")
        parts = dict(zip(("of", "arguments", "keywords"), meaning, strict=True))
        return node_digest("constructed", *self._labelled(parts))

    def _wrapped(self, value: Any) -> bytes | None:
        """Return the digest of an object around functions: what it holds, and its class."""
        parts: dict[str, Any]
        if isinstance(value, (functools.partial, functools.partialmethod)):
            tag = "partial"
            parts = {"of": value.func, "arguments": value.args, "keywords": value.keywords}
        elif isinstance(value, (staticmethod, classmethod)):
            tag, parts = type(value).__name__, {"of": value.__func__}
        elif isinstance(value, property):
            tag, parts = "property", {"get": value.fget, "set": value.fset, "delete": value.fdel}
        elif isinstance(value, functools.cached_property):
            tag, parts = "property", {"get": value.func}
        else:
            return None
        self._note_value(value)
        own = b""
        if is_user_class(type(value)):
            own = node_digest(
                "own", self.digest(type(value)), self._state_of(own_attributes(value))
            )
        shown = {name: part for name, part in parts.items() if part is not None}
        return node_digest(tag, own, *shown, *self._labelled(shown))

    def _function(self, function: types.FunctionType) -> bytes:
        if is_installed(function):
            return self._by_name(function)
        code, namespace = function.__code__, function.__globals__
        is_users = is_user_code(code, namespace)
        name = namespace.get("__name__")
        assigned = own_assigned_attributes(function)
        attributes = {
            name: value
            for name, value in vars(function).items()
            if name != "__wrapped__" and name not in assigned
        }
        attributes |= annotations_that_count(function.__annotations__, self._output)
        self._note("function", place_text(function))
        # A wrapper made by an installed decorator is known by its name and by what it wraps; the
        # globals of its module are that module's own affair.
        return node_digest(
            "function",
            code_digest(code, self.digest) if is_users else f"installed {name}.{code.co_qualname}",
            self._named("default", defaults_of(function).items()),
            self._named("closure variable", self._closure(function)),
            self._named("global", self._globals(function) if is_users else ()),
            self._named("attribute", attributes.items()),
            self._imports(function) if is_users else b"",
        )

    def _closure(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        state = {name for name, cell in cells_of(function) if id(cell) in self._state.cells}
        return [(name, value) for name, value in closure_of(function) if name not in state]

    def _globals(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        found = globals_of(function)
        if any(value is known for value in found.values() for known in _SEE_EVERYTHING):
            found |= what_is_in(function.__globals__)
        return [
            (name, value)
            for name, value in found.items()
            if not self._state.is_state(function, name.partition(".")[0])
        ]

    def _imports(self, function: types.FunctionType) -> bytes:
        """Digest the user's files that are imported inside a function."""
        files = self._files.of(function)
        digests = []
        self._depth += 1
        for name, file in sorted(files.items()):
            self._label = "import"
            if isinstance(file.content, types.ModuleType):
                digest = self.digest(file.content)
            else:
                self._note("file", name)
                digest = self._file_digest(name, file.content)
            digests.append(node_digest(name, digest))
        self._label = None
        self._depth -= 1
        return node_digest("imports", *digests)

    def _file_digest(self, name: str, content: types.CodeType | str) -> bytes:
        if name not in self._file_digests:
            self._file_digests[name] = (
                code_digest(content, self.digest)
                if isinstance(content, types.CodeType)
                else self.digest(content)
            )
        return self._file_digests[name]

    def _module(self, module: types.ModuleType) -> bytes:
        """Digest a module that is used as a whole: everything in it, as it is loaded."""
        if not is_user_module(module.__name__):
            return self._by_name(module)
        self._note("module", module.__name__)
        attributes = what_is_in(vars(module))
        own = self._all((type(module),)) if is_user_class(type(module)) else ()
        return node_digest("module", *own, self._named("its", attributes.items()))

    def _class(self, cls: type) -> bytes:
        if not is_user_class(cls):
            return self._by_name(cls)
        self._note("class", f"class {cls.__qualname__} of {cls.__module__}")
        if is_typed_dict(cls):
            annotated = annotations_that_count(vars(cls).get("__annotations__"), self._output)
            its = [self._named("its", annotated.items())] if annotated else []
            return node_digest("typed dict", cls.__name__, *its)
        metaclass = (type(cls),) if is_user_class(type(cls)) else ()
        bases = self._all((*cls.__bases__, *metaclass))
        attributes = attributes_that_count(cls, self._output)
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
        at, label, self._label = len(self.parts), self._label, None
        digest = data_digest(value, self.digest)
        if digest is None:
            self._label = label
        elif label is not None:
            self.parts.insert(at, VersionPart(self._depth, label, "value", constant_text(value)))
        return digest

    def _object(self, value: Any) -> bytes:
        """Take an object by what pickle would keep of it, or by its class if that is nothing."""
        cls = type(value)
        behind = annotated_by(value)
        if behind is not None:
            return node_digest("alias", *self._all((behind,)))
        if cls.__module__ in ("typing", "types") and cls is not types.SimpleNamespace:
            return self._annotation(value)
        if cls.__module__ in ("weakref", "_weakref") or isinstance(value, weakref.ref):
            return self._opaque(value)
        try:
            reduced = _reduced(value)
        except Exception:  # noqa: BLE001 - locks, clients, sessions: they raise what they like
            return self._unpicklable(value)
        self._note_value(value)
        if isinstance(reduced, str) and is_user_class(cls):
            return self._unpicklable(value)
        if isinstance(reduced, str):
            return node_digest("installed", qualified_name(cls), reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        items, pairs = list(items or ()), list(pairs or ())
        parts = self._all((cls, make, arguments, items, pairs))
        kept = self._state_of(without_cached(cls, state))
        return node_digest("object", *parts, kept, self._state_of(forgotten_by_pickle(value)))

    def _annotation(self, value: Any) -> bytes:
        """Take `list[X]` by its parts, and a TypeVar or NewType by its name."""
        self._note_value(value)
        if hasattr(value, "__origin__"):
            metadata = metadata_that_counts(getattr(value, "__metadata__", ()))
            parts = (value.__origin__, value.__args__, *([metadata] if metadata else []))
            return node_digest("alias", *self._all(parts))
        text = value.__name__ if hasattr(value, "__supertype__") else repr(value)
        return node_digest("annotation", text)

    def _opaque(self, value: Any) -> bytes:
        """Take an object by its type alone."""
        self._note("opaque", qualified_name(type(value)))
        if not is_user_class(type(value)):
            return node_digest("opaque", qualified_name(type(value)))
        return node_digest("opaque", *self._all((type(value),)))

    def _unpicklable(self, value: Any) -> bytes:
        """Take an object of the user's class by its attributes, any other by its type alone."""
        cls = type(value)
        if not is_user_class(cls):
            return self._opaque(value)
        self._note_value(value)
        state = without_cached(cls, own_attributes(value))
        return node_digest("opaque", *self._all((cls,)), self._state_of(state))


def _reduced(value: Any) -> Any:
    """Return what pickle keeps of an object; what counts of one that says so, however pickled."""
    kept = getattr(type(value), "__geneva_state__", None)
    if kept is None:
        return value.__reduce_ex__(4)
    return copyreg.__newobj__, (type(value),), kept(value)  # type: ignore[attr-defined]


def _compiled_package_of(module: Any) -> str | None:
    """Return the digest of the compiled package that a module is in, if nobody installed it."""
    root = module.partition(".")[0] if isinstance(module, str) else ""
    file = module_facts(root).get("__file__") if root not in sys.stdlib_module_names else None
    return compiled_package_digest(file) if isinstance(file, str) else None


def _types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for number in range(kind.num_fields):
        yield from _types_in(kind.field(number).type)


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
