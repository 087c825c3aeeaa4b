"""What of a class counts: its attributes, without what Python and decorators write into it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from geneva.udf.identity.user_code import is_user_class, is_user_code

# What Python writes into a class by itself, or what says where and how it was written.
_NOISE = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__"),
        *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"),
        *("__firstlineno__", "__static_attributes__", "__classdictcell__", "__type_params__"),
        *("__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__"),
        *("__dataclass_fields__", "__dataclass_params__", "__signature__", "__slotnames__"),
        *("__protocol_attrs__", "__non_callable_proto_members__"),
        *("__callable_proto_members_only__", "_is_runtime_protocol"),
    }
)


def attributes_that_count(cls: type, output: Sequence[pa.DataType] = ()) -> list[tuple[str, Any]]:
    """Return the attributes of a user's class that say what it does."""
    attributes = {
        name: value
        for name, value in vars(cls).items()
        if name not in _NOISE
        and not name.startswith("__pydantic_")
        and not _is_generated(cls, name, value)
    }
    if issubclass(cls, enum.Enum):
        attributes = {n: v for n, v in attributes.items() if _counts_in_enum(cls, n, v)}
        attributes["enum members"] = [
            (name, member.name, member.value, member_attributes(member))
            for name, member in cls.__members__.items()
        ]
    if dataclasses.is_dataclass(cls):
        attributes["dataclass fields"] = [
            (
                *(f.name, _default(f.default), _default(f.default_factory)),
                *(f.init, f.compare, f.hash, *_said_besides(f)),
            )
            for f in dataclasses.fields(cls)
        ]
        params = vars(cls).get("__dataclass_params__")
        attributes["dataclass"] = {name: getattr(params, name, None) for name in _PARAMETERS}
    if hasattr(cls, "__pydantic_fields__"):
        attributes["pydantic fields"] = repr(cls.__pydantic_fields__)
    annotated = annotations_that_count(vars(cls).get("__annotations__"), output)
    return [*attributes.items(), *annotated.items()]


def annotations_that_count(annotations: Any, output: Sequence[pa.DataType] = ()) -> dict[str, Any]:
    """Return, of a class or function, the annotations that programs read: those with `Annotated`.

    Any other is a note for readers and type checkers. What says the type of the `output` counts
    as that does: `geneva.Columns`, and Arrow types that are in it. An annotation that is text
    counts as it is written: a worker has no names to look up in it.
    """
    given = annotations if isinstance(annotations, Mapping) else {}
    return {
        f"annotation {name}": value for name, value in given.items() if _has_metadata(value, output)
    }


_ANNOTATED = re.compile(r"\bAnnotated\s*\[")


def _has_metadata(
    annotation: Any, output: Sequence[pa.DataType] = (), within: tuple[Any, ...] = ()
) -> bool:
    if isinstance(annotation, str):
        return _ANNOTATED.search(annotation) is not None
    if isinstance(annotation, (list, tuple)):  # parameters of a Callable
        return any(_has_metadata(part, output, within) for part in annotation)
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return False  # whatever attributes it has
    if isinstance(annotation, typing.ForwardRef):
        return _has_metadata(annotation.__forward_arg__)
    if isinstance(annotation, dataclasses.InitVar):
        return _has_metadata(annotation.type, output, within)
    if _is_alias(annotation):
        is_known = any(annotation is outer for outer in within)  # it may refer to itself
        return not is_known and _has_metadata(_value(annotation), output, (*within, annotation))
    # Of `typing` only: an annotation may be any object, which answers as it likes, or raises.
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        says_more = not all(_is_of_output(part, output) for part in annotation.__metadata__)
        return says_more or _has_metadata(annotation.__origin__, output, within)
    parts = (origin, *typing.get_args(annotation))
    return origin is not None and _has_metadata(parts, output, within)


def _is_of_output(metadata: Any, output: Sequence[pa.DataType]) -> bool:
    is_type_of_it = isinstance(metadata, pa.DataType) and metadata in output
    return is_type_of_it or _package(metadata) == "geneva"  # the mark of `geneva.Columns`


def annotated_by(alias: Any) -> Any:
    """Return what a `type X = ...` stands for, if that has metadata; None for all else."""
    return _value(alias) if _is_alias(alias) and _has_metadata(alias) else None


def _is_alias(annotation: Any) -> bool:
    return type(annotation).__name__ == "TypeAliasType"


def _value(alias: Any) -> Any:
    try:
        return alias.__value__
    except Exception:  # noqa: BLE001 - it is evaluated now: its names may be there for checkers only
        return None


def metadata_that_counts(value: Any) -> Any:
    """Return what counts of metadata: of an object of an installed package, what it shows.

    Such objects may count themselves: the attributes of marshmallow's fields say how many were
    made before.
    """
    if type(value) in (list, tuple):
        return type(value)(map(metadata_that_counts, value))
    if type(value) is dict:
        return {name: metadata_that_counts(part) for name, part in value.items()}
    if isinstance(value, type) or is_user_class(type(value)) or _package(value) in _KNOWN:
        return value
    try:
        shown = _SET.sub(_in_order, _ADDRESS.sub("", repr(value)))
    except Exception:  # noqa: BLE001 - whatever it raises, it shows nothing
        shown = ""
    return (type(value), shown, _of_user_in(value))


_KNOWN = frozenset({"geneva", "numpy", "pyarrow"}) | sys.stdlib_module_names
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SET = re.compile(r"\{([^{}:]*)\}")
"""A set that is shown, which has another order in each process; a dict has colons."""


def _in_order(shown: re.Match[str]) -> str:
    return f"{{{', '.join(sorted(shown[1].split(', ')))}}}"


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _of_user_in(value: Any) -> list[Any]:
    """Return the user's functions, classes and objects that an object of others holds."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    with contextlib.suppress(Exception):  # it may refuse to be pickled in any way
        waiting = [*value.__reduce_ex__(4)[1:3]]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen[id(part)] = part
            if type(part) in (list, tuple):
                waiting += part
            elif type(part) is dict:
                waiting += part.values()
            elif isinstance(part, types.FunctionType) or is_user_class(
                part if isinstance(part, type) else type(part)
            ):
                found.append(part)
    return found


def _said_besides(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Return what few fields say; `__match_args__` says which are not by keyword."""
    metadata = metadata_that_counts(dict(field.metadata))
    few = {"metadata": metadata, "not in repr": not field.repr}
    said = {name: value for name, value in few.items() if value}
    return (said,) if said else ()


_PARAMETERS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")


def is_typed_dict(cls: type) -> bool:
    """Say whether a class is a TypedDict: for Python a dict, whose keys are only annotations."""
    return type(cls).__name__ == "_TypedDictMeta" and issubclass(cls, dict)


def member_attributes(member: enum.Enum) -> dict[str, Any]:
    """Return what an enum's `__init__` or `__new__` wrote into a member."""
    return {
        name: value
        for name, value in sorted(getattr(member, "__dict__", {}).items())
        if not _is_sunder(name) and name != "__objclass__"
    }


def _default(value: Any) -> Any:
    # Not `is`: a class that was unpickled has another MISSING.
    return None if isinstance(value, type(dataclasses.MISSING)) else (value,)


def _is_sunder(name: str) -> bool:
    return name.startswith("_") and name.endswith("_") and not name.startswith("__")


def _counts_in_enum(cls: type[enum.Enum], name: str, value: Any) -> bool:
    if name in cls.__members__:
        return False
    code = _code(value)
    if code is not None:
        return _is_users(value, code)
    return not _is_sunder(name) and not name.startswith("__")


# What @dataclass and NamedTuple write into a class: its fields say the same, in every version.
_GENERATED = frozenset(
    {
        *("__init__", "__new__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"),
        *("__replace__", "__getnewargs__", "__subclasshook__"),
    }
)


def _is_generated(cls: type, name: str, value: Any) -> bool:
    if type(value).__name__ == "_tuplegetter":  # a field of a NamedTuple
        return True
    code = _code(value)
    if code is None or name not in _GENERATED:
        return False
    if getattr(cls, "_is_protocol", False):
        return not _is_users(value, code)
    if hasattr(cls, "_field_defaults"):
        is_lambda = name == "__new__" and code.co_name == "<lambda>"
        return is_lambda or not _is_users(value, code)
    is_written_by_dataclass = code.co_qualname.startswith("__create_fn__.")
    return dataclasses.is_dataclass(cls) and (is_written_by_dataclass or not _is_users(value, code))


def _code(value: Any) -> types.CodeType | None:
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _is_users(value: Any, code: types.CodeType) -> bool:
    function = getattr(value, "__func__", value)
    return is_user_code(code, getattr(function, "__globals__", {}))
