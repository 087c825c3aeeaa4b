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

import ast
import builtins
import collections
import contextlib
import dataclasses
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import importlib.util
import inspect
import linecache
import logging
import os
import pathlib
import re
import sys
import sysconfig
import types
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa


def fingerprint(callable_: Any, data_type: pa.DataType, call_shape: str = "") -> str:
    """Return 32 hex digits that are equal where the column's values must be equal."""
    digest = _node("udf", str(data_type), call_shape, _Walk().digest(callable_))
    return digest.hex()[:32]


# ------------------------------------------------------------------------ whose code is it

_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_paths()[key]) + os.sep
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Often on the path without being installed, and never the user's.
_NOT_THE_USERS = frozenset({"geneva", "pyspark", "py4j"})


def is_user_module(name: str | None) -> bool:
    """Say whether a module is the user's own: __main__, or one that nobody installed."""
    if name is None:
        return False
    root = name.partition(".")[0]
    if root in _NOT_THE_USERS or root in sys.stdlib_module_names:
        return False
    # Installed packages put odd things into sys.modules, so the root package is asked first.
    for known in (root, name):
        # Not getattr: asking a lazy module for an attribute would import it.
        facts = (
            object.__getattribute__(sys.modules.get(known), "__dict__")
            if known in sys.modules
            else {}
        )
        file = facts.get("__file__")
        if isinstance(file, str):
            return known == "__main__" or _is_user_file(file)
    return True  # a notebook, exec, or a module made by hand


@functools.lru_cache(maxsize=4096)
def _is_user_file(file: str) -> bool:
    """Say whether a source file lies outside everything that was installed."""
    path = os.path.realpath(file)
    packaged = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return not packaged and not path.startswith(_INSTALLED)


def user_modules() -> list[types.ModuleType]:
    """Return the loaded modules that are the user's own (without __main__)."""
    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    return [
        module
        for name, module in loaded
        if isinstance(module, types.ModuleType)
        and name != "__main__"
        and module.__name__ == name
        and is_user_module(name)
    ]


# ------------------------------------------------------------------------ what code refers to


def references(target: Any) -> dict[str, Any]:
    """Return everything a function or object brings along, by a name that can be shown."""
    if hasattr(type(target), "__geneva_meaning__"):
        meaning = target.__geneva_meaning__()
        if not isinstance(meaning, tuple):
            return {type(meaning).__name__: meaning}
        cls, args, kwargs = meaning
        return {f"class '{cls.__name__}'": cls, **_numbered("constructor argument", args), **kwargs}
    if isinstance(target, functools.partial):
        return {"partial": target.func, **_numbered("argument", target.args), **target.keywords}
    if isinstance(target, types.MethodType):
        return {"self": target.__self__, **references(target.__func__)}
    if isinstance(target, types.FunctionType):
        parts = {f"closure variable '{n}'": v for n, v in _closure(target)}
        parts |= {f"global '{n}'": v for n, v in _globals(target).items() if not _is_module(v)}
        return parts | _numbered("default", target.__defaults__ or ())
    if isinstance(target, (list, tuple, set, frozenset)):
        return _numbered("item", target)
    if isinstance(target, dict):
        return {f"item {k!r}": v for k, v in target.items()}
    if inspect.isclass(target):
        methods = {n: v for n, v in vars(target).items() if not n.startswith("__") or callable(v)}
        found = {f"attribute '{n}'": _unwrapped(v) for n, v in methods.items()}
        return found | _numbered("base", target.__bases__)
    state = getattr(target, "__dict__", None)
    return {f"attribute '{n}'": v for n, v in state.items()} if isinstance(state, dict) else {}


def modules_used(target: Any) -> dict[str, set[str]]:
    """Return, for the user's modules that are reached from a function, the attributes it takes.

    A module that is used as a whole (`getattr(helpers, name)`) is left out: nobody knows.
    """
    taken: dict[str, set[str]] = {}
    as_a_whole: set[str] = set()
    seen: dict[int, Any] = {}  # keeps the objects: ids are reused
    waiting = [target]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not _is_followed(value):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            for owner, attribute in _module_accesses(value):
                if attribute is None:
                    as_a_whole.add(owner)
                else:
                    taken.setdefault(owner, set()).add(attribute)
        waiting.extend(references(value).values())
    return {name: attributes for name, attributes in taken.items() if name not in as_a_whole}


def _module_accesses(function: types.FunctionType) -> Iterator[tuple[str, str | None]]:
    """Yield (module, attribute) for the user's modules; None for a module taken as a whole."""
    for chain in _global_chains(function.__code__):
        value: Any = function.__globals__.get(chain[0])
        for attribute in (*chain[1:], None):
            if not isinstance(value, types.ModuleType) or not is_user_module(value.__name__):
                break
            yield value.__name__, attribute
            value = getattr(value, attribute, None) if attribute else None


def _is_followed(value: Any) -> bool:
    """Say whether a value can lead to the user's code."""
    containers = (list, tuple, set, frozenset, dict, functools.partial, types.MethodType)
    if isinstance(value, containers) or hasattr(type(value), "__geneva_meaning__"):
        return True
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return is_user_module(owner.__module__)


def _unwrapped(member: Any) -> Any:
    """Return the function inside a static method, class method or property."""
    member = getattr(member, "fget", None) or getattr(member, "func", None) or member
    return getattr(member, "__func__", member)


def _is_module(value: Any) -> bool:
    """Say whether a value is a module."""
    return isinstance(value, types.ModuleType)


def _numbered(label: str, values: Iterable[Any]) -> dict[str, Any]:
    return {f"{label} {number}": value for number, value in enumerate(values)}


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closed over; not what it assigns itself, for that is state."""
    cells = function.__closure__ or ()
    assigned = _names(function.__code__, "STORE_DEREF", "DELETE_DEREF")
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name in assigned:
            continue
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, _Missing


class _Missing:
    """A name that has no value (yet)."""


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals a function refers to; of the user's modules, the attributes it takes."""
    found = {}
    assigned = _names(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL")
    for chain in _global_chains(function.__code__):
        if chain[0] in _MODULE_FACTS or chain[0] in assigned:
            continue
        value = function.__globals__.get(chain[0], getattr(builtins, chain[0], _Missing))
        used = 1
        while used < len(chain) and _is_module(value) and is_user_module(value.__name__):
            value = getattr(value, chain[used], _Missing)
            used += 1
        found[".".join(chain[:used])] = value
    return found


# Where code lives, not what it does. (Every class body reads __name__.)
_MODULE_FACTS = frozenset(
    {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"}
)


def _names(code: types.CodeType, *operations: str) -> set[str]:
    """Return the names that some operations in a function, or in functions inside it, refer to."""
    return {
        instruction.argval
        for inner in (code, *_nested_codes(code))
        for instruction in dis.get_instructions(inner)
        if instruction.opname in operations
    }


def _global_chains(code: types.CodeType) -> set[tuple[str, ...]]:
    """Return the dotted names that start at a global: `helpers.clean(x)` -> (helpers, clean)."""
    chains: set[tuple[str, ...]] = set()
    for inner in (code, *_nested_codes(code)):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(inner):
            if instruction.opname in _LOADS_GLOBAL:
                chains.add(chain)
                chain = (instruction.argval,)
            elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, instruction.argval)
            elif instruction.opname not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
                chains.add(chain)
                chain = ()
    return chains - {()}


_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


# ------------------------------------------------------------------------ digests of anything


def _node(tag: str, *parts: str | bytes) -> bytes:
    """Hash a tagged list of parts; lengths keep ("ab", "c") apart from ("a", "bc")."""
    state = hashlib.blake2b(digest_size=20)
    for part in (tag, *parts):
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


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
            return _node(type(value).__name__, repr(value))
        if type(value) is int:
            return _node("int", format(value, "x"))
        if type(value) in (str, bytes):
            return _node(type(value).__name__, value)
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._path:
            return _node("cycle", str(self._path[id(value)]))
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
        return _node("named", *(_node(n, self.digest(v)) for n, v in sorted(pairs, key=_first)))

    def _container(self, value: Any) -> bytes | None:
        kind = type(value)
        if kind in (list, tuple):
            return _node(kind.__name__, *self._all(value))
        if isinstance(value, (set, frozenset)):
            return _node("set", self.digest(kind), *sorted(self._all(value)))
        if kind in (dict, types.MappingProxyType, collections.defaultdict):
            pairs = sorted(_node("", self.digest(k), self.digest(v)) for k, v in value.items())
            factory = getattr(value, "default_factory", None)
            return _node("dict", self.digest(factory), *pairs)
        return None

    # -- code

    def _code(self, value: Any) -> bytes | None:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return _node("method", self.digest(value.__func__), self.digest(value.__self__))
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return _node("partial", *self._all(parts))
        if isinstance(value, (staticmethod, classmethod)):
            return _node(type(value).__name__, self.digest(value.__func__))
        if isinstance(value, property):
            return _node("property", *self._all((value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return _node("property", self.digest(value.func))
        if isinstance(value, types.ModuleType):
            name = "user" if is_user_module(value.__name__) else value.__name__
            return _node("module", name)
        meaning = getattr(type(value), "__geneva_meaning__", None)
        if meaning is not None:
            return self.digest(meaning(value))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.digest(value.__wrapped__)
        if inspect.isroutine(value) or isinstance(value, np.ufunc):
            owner = getattr(value, "__self__", None)
            bound = b"" if owner is None or _is_module(owner) else self.digest(owner)
            return _node("installed", _qualified_name(value), bound)
        return None

    def _function(self, function: types.FunctionType) -> bytes:
        if not is_user_module(function.__module__) and "<locals>" not in function.__qualname__:
            return _node("installed", _qualified_name(function))
        code = function.__code__
        tree = _verified_tree(code)
        # A wrapper made by an installed decorator is its code and what it wraps: the globals of
        # its module are that module's own affair.
        return _node(
            "function",
            _code_digest(code, self) if tree is None else _node("source", _canonical(tree)),
            self.digest(function.__defaults__ or ()),
            self.digest(function.__kwdefaults__ or {}),
            self._named(_closure(function)),
            self._named(_globals(function).items() if _is_user_code(code) else ()),
            *sorted(_imported_sources(code, function.__globals__.get("__package__") or "")),
        )

    def _class(self, cls: type) -> bytes:
        if not is_user_module(cls.__module__):
            return _node("installed", _qualified_name(cls))
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
        return _node("class", cls.__name__, _node("bases", *bases), self._named(attributes.items()))

    # -- values

    def _data(self, value: Any) -> bytes | None:
        if isinstance(value, enum.Enum):
            return _node("member", type(value).__name__, value.name, self.digest(value.value))
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return _node("numpy", str(array.shape), self.digest(array.tolist()))
            data = np.ascontiguousarray(array).tobytes()
            return _node("numpy", array.dtype.str, str(array.dtype), str(array.shape), data)
        if isinstance(value, (np.dtype, pa.DataType, pa.Field, pa.Schema)):
            return _node("type", str(value))
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return _node("arrow", str(value.type), self.digest(value.to_pylist()))
        if isinstance(value, pa.Scalar):
            return _node("arrow", str(value.type), self.digest(value.as_py()))
        if isinstance(value, (pa.RecordBatch, pa.Table)):
            return _node("arrow", str(value.schema), self.digest(value.to_pylist()))
        if isinstance(value, pathlib.PurePath):
            return _node("path", str(value))
        if isinstance(value, re.Pattern):
            return _node("regex", self.digest(value.pattern), str(value.flags))
        if isinstance(value, (memoryview, bytearray)):
            return _node("bytes", bytes(value))
        if isinstance(value, logging.Logger):
            return _node("logger")  # it is named after its module
        return None

    def _object(self, value: Any) -> bytes:
        """Take an object by what pickle would keep of it, or by its class if that is nothing."""
        cls = type(value)
        if cls.__module__ in ("typing", "types") and cls is not types.SimpleNamespace:
            return _node("annotation", repr(value))
        if cls.__module__ in ("weakref", "_weakref") or isinstance(value, weakref.ref):
            return _node("opaque", _qualified_name(cls))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - locks, clients, sessions: they raise what they like
            return _node("opaque", self.digest(cls))
        if isinstance(reduced, str):
            return _node("installed", _qualified_name(cls), reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        items, pairs = list(items or ()), list(pairs or ())
        return _node("object", *self._all((cls, make, arguments, state, items, pairs)))


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
    return code.co_filename.startswith("<") or _is_user_file(code.co_filename)


def _is_method(value: Any) -> bool:
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    return isinstance(value, kinds) and is_user_module(getattr(value, "__module__", "") or "x")


# ------------------------------------------------------------------------ code, by its source


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Compile in silence: Python warned of the user's source when it was imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> tuple[dict[tuple[str, int], list[Any]], ...] | None:
    """Return a file's function nodes and code objects, both by (name, first line)."""
    try:
        with _no_warnings():
            tree = ast.parse(source)
            compiled = compile(tree, "<source>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            nodes[node.name, first].append(node)
        elif isinstance(node, ast.Lambda):
            nodes["<lambda>", node.lineno].append(node)
    codes: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
    for code in _nested_codes(compiled):
        codes[code.co_name, code.co_firstlineno].append(code)
    return nodes, codes


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of every function inside a function, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested_codes(constant)


def _verified_tree(code: types.CodeType) -> Any | None:
    """Return the syntax tree of exactly this code, or None if no source compiles to it."""
    linecache.checkcache(code.co_filename)
    parsed = _parsed("".join(linecache.getlines(code.co_filename)))
    if parsed is None:
        return None
    nodes, codes = (table.get((code.co_name, code.co_firstlineno), []) for table in parsed)
    wanted = _code_digest(code)
    if wanted not in map(_code_digest, codes):
        return None
    if len(nodes) > 1:  # several lambdas on one line
        nodes = [n for n in nodes if _compiles_to(n, code.co_freevars, wanted)]
    return nodes[0] if nodes else None


def _compiles_to(node: ast.Lambda, free_names: tuple[str, ...], wanted: bytes) -> bool:
    """Compile one lambda inside a function that owns its free variables, and compare."""
    parameters = ", ".join(free_names)
    module = ast.parse(f"def around({parameters}):\n    return lambda: None")
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [ast.copy_location(ast.Return(value=node), node)]
    with _no_warnings():
        compiled = compile(module, "<source>", "exec", dont_inherit=True)
    around = next(_nested_codes(compiled))
    return any(_code_digest(code) == wanted for code in around.co_consts if inspect.iscode(code))


_NO_MEANING = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns"})


_EMPTY = "str:''"


def _canonical(node: Any) -> str:
    """Write out a function's tree: no name, decorators, defaults, docstrings or annotations."""
    if isinstance(node, ast.Lambda):
        body = [_dump(node.body, in_class=False)]
    else:
        body = _statements(node.body, in_class=False)
    return f"{_parameters(node.args)}: {body}"


def _parameters(arguments: ast.arguments) -> list[list[str]]:
    groups = [arguments.posonlyargs, arguments.args, arguments.kwonlyargs]
    stars = [[a] if a else [] for a in (arguments.vararg, arguments.kwarg)]
    return [[argument.arg for argument in group] for group in groups + stars]


def _statements(body: list[Any], *, in_class: bool) -> list[str]:
    first: Any = body[0] if body else None
    is_constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_constant and isinstance(first.value.value, str):
        body = body[1:]  # a docstring
    return [_dump(statement, in_class=in_class) for statement in body]


def _dump(node: Any, *, in_class: bool) -> str:
    """Dump a tree alike on all Python versions: empty fields and positions are left out."""
    if isinstance(node, list):
        return f"[{', '.join(_dump(item, in_class=in_class) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    # Inside a function an annotation is never evaluated; in a class it may make a field.
    if isinstance(node, ast.AnnAssign) and not in_class:
        value = None if node.value is None else _dump(node.value, in_class=False)
        return f"Assign({_dump(node.target, in_class=False)}, {value})"
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.JoinedStr):  # some versions put empty strings between the values
        pieces = [_dump(v, in_class=False) for v in node.values]
        return f"JoinedStr({', '.join(piece for piece in pieces if piece != _EMPTY)})"
    inner_class = isinstance(node, ast.ClassDef)
    is_scope = inner_class or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _NO_MEANING or value is None or value == []:
            continue
        if is_scope and name == "body":
            parts.append(f"body={_statements(value, in_class=inner_class)}")
        else:
            parts.append(f"{name}={_dump(value, in_class=in_class and not is_scope)}")
    return f"{type(node).__name__}({', '.join(parts)})"


# ------------------------------------------------------------------------ code, by its bytecode

_FLAGS = (
    inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
) | inspect.CO_ASYNC_GENERATOR


def _code_digest(code: types.CodeType, walk: _Walk | None = None) -> bytes:
    """Digest what the bytecode does: no names of files, no lines, no order of constants."""
    walk = walk or _Walk()
    instructions: list[dis.Instruction] = []
    index = {}  # offset -> number, so that a jump is not told in bytes
    for instruction in dis.get_instructions(code):
        index[instruction.offset] = len(instructions)
        if instruction.opname not in ("EXTENDED_ARG", "CACHE", "NOP"):
            instructions.append(instruction)
    parts: list[str | bytes] = []
    for i in instructions:
        parts.append(i.opname)
        if i.opcode in dis.hasconst:
            is_code = isinstance(i.argval, types.CodeType)
            parts.append(_code_digest(i.argval) if is_code else walk.digest(i.argval))
        elif i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            parts.append(str(index.get(i.argval, i.argval)))
        else:
            parts.append(str(i.argval if isinstance(i.argval, (str, tuple)) else i.arg))
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_varnames[: sum(shape)], code.co_flags & _FLAGS, shape)
    handlers = getattr(code, "co_exceptiontable", b"")
    return _node("bytecode", str(names), handlers, *parts)


# ------------------------------------------------------------------------ imports inside functions


def _imported_sources(code: types.CodeType, package: str) -> set[bytes]:
    """Digest the user's files that a function imports in its body (they may not be loaded yet)."""
    seen: set[str] = set()
    return {d for name in _names(code, "IMPORT_NAME") for d in _source_files(name, package, seen)}


def _source_files(name: str, package: str, seen: set[str]) -> Iterator[bytes]:
    """Yield digests of a module's file and of the user's files that it imports in turn."""
    try:
        spec = importlib.util.find_spec(name) or importlib.util.find_spec(f".{name}", package)
    except (ImportError, ValueError, AttributeError, TypeError):
        return
    file = getattr(spec, "origin", None)
    if not file or file in seen or not file.endswith(".py") or not _is_user_file(file):
        return
    if name.partition(".")[0] in _NOT_THE_USERS:
        return
    seen.add(file)
    try:
        with _no_warnings():
            tree = ast.parse(pathlib.Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield _node("file", "\n".join(_statements(tree.body, in_class=True)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _source_files(alias.name, package, seen)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _source_files(node.module, package, seen)
