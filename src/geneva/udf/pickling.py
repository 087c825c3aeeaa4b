"""Writing a UDF's code so that a process without the user's files can run it.

Only modules that are imported inside a function are read, from their files.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import inspect
import io
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from geneva.udf.identity.class_meaning import member_attributes
from geneva.udf.identity.imported_files import ImportedFile, ImportedFiles
from geneva.udf.identity.references import ModulesUsed, cells_of, modules_used, references
from geneva.udf.identity.user_code import (
    is_installed,
    is_user_class,
    is_user_code,
    is_user_module,
    user_modules,
)
from geneva.udf.identity.value_meaning import without_cached
from geneva.udf.known_by_name import reduced_by_value
from geneva.udf.shipped_modules import ShippedModule, shipped

# A UDF that refers to itself (recursion) must be pickled by its state, not by a nested dump.
serializing = contextvars.ContextVar("serializing", default=False)


_registry_lock = threading.Lock()  # cloudpickle's registry of modules belongs to the process


@contextlib.contextmanager
def _user_code_by_value() -> Iterator[None]:
    """Have cloudpickle embed the user's own modules, and leave installed ones by name."""
    with _registry_lock:
        known = cloudpickle.list_registry_pickle_by_value()
        added = [m for m in user_modules() if m.__name__ not in known]
        token = serializing.set(True)
        try:
            for module in added:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            serializing.reset(token)
            for module in added:
                if module.__name__ in sys.modules:
                    cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Embeds of the user's modules only what the function takes from them.

    Whole modules would drag along their locks, clients and data.
    """

    def __init__(self, file: io.BytesIO, used: ModulesUsed, *, by_name: bool = False) -> None:
        """Write to a file; `by_name`: leave objects by the names that they say, as pickle does."""
        super().__init__(file)
        self._used = used
        self._by_name = by_name
        self.unasked: set[str] = set()
        """The user's modules that are embedded without anything: no function asks for it."""
        self._files = ImportedFiles()
        self.imported: dict[str, ImportedFile] = {}
        """What the functions that are embedded import when they are called."""
        self.functions: list[types.FunctionType] = []
        """The user's functions that are embedded, wherever they were found."""
        self.classes: list[type] = []
        """The user's classes that are embedded."""
        self._of_dispatchers: dict[int, tuple[Any, str]] = {}
        """Parts of dispatchers, by their ids: whose they are, and under which name."""

    def reducer_override(self, obj: Any) -> Any:
        for part, where in _parts_of_dispatcher(obj).items():
            self._of_dispatchers.setdefault(part, where)
        if id(obj) in self._of_dispatchers:
            # By itself it is a closure over weak references, and here it is one of another's.
            return getattr, self._of_dispatchers[id(obj)]
        if _is_of_user(obj):
            self.functions.append(obj)
            self.imported.update(self._files.of(obj))
        if isinstance(obj, type) and is_user_class(obj):
            self.classes.append(obj)
        if isinstance(obj, types.ModuleType) and self._is_in_part(obj.__name__):
            names = sorted(self._used.attributes.get(obj.__name__, ()))
            values = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
            return _module_with, (obj.__name__, values)
        if isinstance(obj, _CACHED) and not is_installed(obj):
            # By itself it is only a name, which a script of the user's has on no worker.
            return _cached_again, (obj.__wrapped__, obj.cache_parameters())
        if _is_dispatcher(obj) and not is_installed(obj):
            return _dispatching, (obj.__name__,), _dispatched(obj), None, None, _fill_dispatcher
        behind = _behind_ufunc(obj) if type(obj) is np.ufunc else None
        if behind is not None:
            made = (behind, obj.nin, obj.nout, obj.identity)
            return _ufunc_again, made, getattr(obj, "__dict__", None) or None
        if type(obj) is np.vectorize:
            reduced: Any = obj.__reduce_ex__(4)
            return *reduced[:2], without_cached(np.vectorize, reduced[2])
        if type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)
        by_value = reduced_by_value(
            obj, self.dispatch_table, cloudpickle.DEFAULT_PROTOCOL, unless_found=self._by_name
        )
        if by_value is not None:
            return by_value
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and isinstance(obj, type) and issubclass(obj, enum.Enum):
            return _with_members(obj, reduced)
        return reduced

    def _is_in_part(self, module: str) -> bool:
        if module in self._used.attributes:
            return True
        if module in self._used.as_a_whole or module == "__main__" or not is_user_module(module):
            return False
        self.unasked.add(module)
        return True


class _WithoutAnnotations(_Pickler):
    """Shows what is embedded for more than an annotation. What it writes is of no use."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if type(obj) is dataclasses.Field:
            return _without(obj.__reduce_ex__(4), "type")
        is_code = isinstance(obj, (types.FunctionType, type)) and isinstance(reduced, tuple)
        return _without(reduced, "__annotations__") if is_code else reduced


def _without(reduced: Any, name: str) -> Any:
    """Leave an attribute out of the state of what is being written."""
    return *reduced[:2], *(_part_without(part, name) for part in reduced[2:3]), *reduced[3:]


def _part_without(state: Any, name: str) -> Any:
    if isinstance(state, tuple):
        return tuple(_part_without(part, name) for part in state)
    return {n: v for n, v in state.items() if n != name} if isinstance(state, dict) else state


def _with_members(cls: type[enum.Enum], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add what cloudpickle leaves out of an enum: its aliases, and attributes of its members.

    Where it is loaded, its members are made without its `__init__` and `__new__`.
    """
    make, (bases, name, qualname, _, *others), (attributes, slots), items, pairs, fill = reduced
    members = {name: _as_member(member.value) for name, member in cls.__members__.items()}
    attributes = {name: value for name, value in attributes.items() if name not in members}
    written = {member.name: member_attributes(member) for member in cls.__members__.values()}
    written = {name: values for name, values in written.items() if values}
    made = (bases, name, qualname, members, *others)
    state = (fill, (attributes, slots), written)
    return make, made, state, items, pairs, _fill_enum


def _as_member(value: Any) -> Any:
    """Return what makes a member of this value: a function by itself would be a method."""
    return enum.member(value) if hasattr(type(value), "__get__") else value


def _fill_enum(cls: Any, state: tuple[Callable[..., Any], Any, Mapping[str, Any]]) -> Any:
    """Give an enum that was just made its methods, and its members their attributes."""
    fill, attributes, written = state
    fill(cls, attributes)
    for name, values in written.items():
        vars(cls[name]).update(values)
    return cls


_CACHED = type(functools.lru_cache(len))


def _is_of_user(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and is_user_code(
        function.__code__, function.__globals__
    )


def _cached_again(function: Any, parameters: Mapping[str, Any]) -> Any:
    """Return a function that remembers its values, as `functools.lru_cache` makes it."""
    return functools.lru_cache(**parameters)(function)


_DISPATCHER = functools.singledispatch(len)
_OF_EVERY_DISPATCHER = frozenset(vars(_DISPATCHER))


def _is_dispatcher(function: Any) -> bool:
    """Say whether a function was made by `functools.singledispatch`."""
    code = function.__code__ if isinstance(function, types.FunctionType) else None
    return code is _DISPATCHER.__code__  # type: ignore[attr-defined]


_PARTS_OF_DISPATCHER = tuple(name for name in vars(_DISPATCHER) if name != "__wrapped__")
_PART_BY_CODE = {
    vars(_DISPATCHER)[name].__code__: name
    for name in _PARTS_OF_DISPATCHER
    if isinstance(vars(_DISPATCHER)[name], types.FunctionType)
}


def _parts_of_dispatcher(value: Any) -> dict[int, tuple[Any, str]]:
    """Return the parts of the dispatcher that a function leads to, by their ids.

    `functools.wraps` gives them to the function that is around it. One that was taken by itself
    (`pick = show.dispatch`) knows the functions of its dispatcher, and that is made of these.
    """
    if not isinstance(value, types.FunctionType):
        return {}
    part = _PART_BY_CODE.get(value.__code__)
    if part is not None:
        made = _dispatching(part)
        _fill_dispatcher(made, (dict(cells_of(value))["registry"].cell_contents, {}))
        return {id(value): (made, part)}
    behind = None
    with contextlib.suppress(ValueError):  # a function that says it is around itself
        behind = inspect.unwrap(value, stop=_is_dispatcher)
    if not _is_dispatcher(behind):
        return {}
    return {id(vars(behind)[name]): (behind, name) for name in _PARTS_OF_DISPATCHER}


def _dispatched(function: Any) -> tuple[dict[type, Any], dict[str, Any]]:
    """Return what makes a dispatcher: its functions by the types that they are for."""
    own = {n: v for n, v in vars(function).items() if n not in _OF_EVERY_DISPATCHER}
    return dict(function.registry), own


def _dispatching(name: str) -> Any:
    """Return a dispatcher without functions: those may refer to it."""

    def first(_: object) -> None: ...

    first.__name__ = name
    return functools.singledispatch(first)


def _fill_dispatcher(dispatcher: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    functions, own = state
    for kind, function in functions.items():
        dispatcher.register(kind, function)
    kept = dict(vars(dispatcher))
    functools.update_wrapper(dispatcher, functions[object])
    vars(dispatcher).update({**kept, **own, "__wrapped__": functions[object]})


def _behind_ufunc(made: np.ufunc) -> Any:
    """Return the function that `np.frompyfunc` was given; None for a ufunc of C code."""
    return next(filter(callable, gc.get_referents(made)), None)


def _ufunc_again(function: Any, inputs: int, outputs: int, identity: Any) -> Any:
    """Return a function over arrays, as `np.frompyfunc` makes it."""
    named = {} if identity is None else {"identity": identity}
    return np.frompyfunc(function, inputs, outputs, **named)


def _module_with(name: str, values: Mapping[str, Any]) -> types.ModuleType:
    """Return a module, of no file, with these attributes."""
    module = types.ModuleType(name)
    module.__dict__.update(values)
    return module


def _cached_property(function: Callable[..., Any], name: str) -> functools.cached_property[Any]:
    """Return such a property with a lock of this process: Python 3.11 has one in each."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


@dataclass(frozen=True, slots=True)
class Dumped:
    """A value as bytes, with the user's code embedded, and the modules which that imports."""

    data: bytes
    modules: tuple[ShippedModule, ...]
    classes_twice: tuple[type, ...]
    """The user's classes that a worker has once more when it imports their modules."""


def dumped(value: Any) -> Dumped:
    """Write a value, with the user's code embedded.

    What its functions take from modules is known when all of them are, also those that only the
    pickler finds, inside objects of others: then it is written once more. It begins with what is
    known without them, so that nothing is embedded only because it was so at first. What is left
    then, a module that no function asks for anything, is an object like any other: it is whole.

    An object that is known by its name travels by its contents. Where these can't, it is left to
    its name: a worker may have its module, and a client of its own there.
    """
    try:
        return _dumped(value, by_name=False)
    except Exception:  # whatever it is: it is the error if names don't help
        with contextlib.suppress(Exception):
            return _dumped(value, by_name=True)
        raise


def _dumped(value: Any, *, by_name: bool) -> Dumped:
    functions: dict[int, types.FunctionType] = {}
    whole: set[str] = set()
    used = modules_used(value)
    while True:
        pickler, data = _written(_Pickler, value, used, by_name=by_name)
        functions |= {id(function): function for function in pickler.functions}
        known, used = used, modules_used(value, *functions.values(), as_a_whole=whole)
        if used != known:  # it only grows, so this ends
            continue
        if not pickler.unasked:
            modules = shipped(pickler.imported)
            twice = _from_files(pickler.classes, modules)
            if twice:
                noted, _ = _written(_WithoutAnnotations, value, used, by_name=by_name)
                twice = _from_files(noted.classes, modules)
            return Dumped(data, modules, twice)
        whole |= pickler.unasked
        used = modules_used(value, *functions.values(), as_a_whole=whole)


def _written(
    kind: type[_Pickler], value: Any, used: ModulesUsed, *, by_name: bool
) -> tuple[_Pickler, bytes]:
    file = io.BytesIO()
    with _user_code_by_value():
        pickler = kind(file, used, by_name=by_name)
        pickler.dump(value)
    return pickler, file.getvalue()


def _from_files(classes: Iterable[type], modules: Iterable[ShippedModule]) -> tuple[type, ...]:
    """Return the classes of modules that workers import from a file."""
    names = {m.name for m in modules if not isinstance(m.content, types.ModuleType)}
    return tuple(cls for cls in classes if cls.__module__ in names)


def culprit(func: Any, depth: int = 0) -> str | None:
    """Name the first thing inside the function that can't be pickled, if one can be found."""
    for label, value in references(func).items():
        try:
            dumped(value)
        except Exception:  # noqa: BLE001 - whatever it is, this is the culprit
            inner = culprit(value, depth + 1) if depth < 6 else None
            return f"{label} -> {inner}" if inner else f"{label} is a {type(value).__qualname__}"
    return None
