"""What Python annotations say about Arrow types, and which Arrow types hold each other's values.

Three questions, all pure: which Arrow type does a return annotation mean (`arrow_type_of`), can a
column of this type be given to a parameter annotated like that (`accepts`), and can an array of
one type become another without losing anything (`holds`).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import functools
import inspect
import re
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from geneva.udf.scope import closure_values, enclosing_names

BLOB_MARK = "lance-encoding:blob"
"""Field metadata of a column whose bytes Lance keeps out of line."""


def is_blob_type(kind: pa.DataType) -> bool:
    """Whether a type is Lance's own one for blobs, of format 2.2 and later."""
    return getattr(kind, "extension_name", "") == "lance.blob.v2"


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type that values of a column have in memory: those of blobs are their bytes."""
    return pa.large_binary() if is_blob_type(kind) else kind


def without_json(kind: pa.DataType) -> pa.DataType:
    """A type with text in the places of JSON."""
    if isinstance(kind, pa.JsonType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([child.with_type(without_json(child.type)) for child in kind])
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(without_json(kind.item_type))
        return pa.map_(kind.key_field, item, keys_sorted=kind.keys_sorted)
    if not pa.types.is_nested(kind):
        return kind
    item = kind.value_field.with_type(without_json(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)


def holds_json(kind: pa.DataType) -> bool:
    """Whether a type is JSON, or has it inside: Lance keeps it in another form than it is given."""
    return without_json(kind) != kind


_PLAIN_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    datetime.datetime: pa.timestamp("us"),
    datetime.date: pa.date32(),
    datetime.time: pa.time64("us"),
    datetime.timedelta: pa.duration("us"),
    np.str_: pa.string(),
    np.bytes_: pa.binary(),
}

# Only the array classes that stand for exactly one type: pa.ListArray does not say of what.
_ARRAY_CLASSES: dict[Any, pa.DataType] = {
    type(pa.nulls(0, t)): t
    for t in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
        *(pa.date32(), pa.date64()),
    )
}

_SEQUENCES = (list, collections.abc.Sequence, collections.abc.MutableSequence)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNIONS = (typing.Union, types.UnionType)

# Names that annotations use although the module imports them for type checkers only.
_USUAL_NAMES = {"pa": pa, "pyarrow": pa, "np": np, "numpy": np, "typing": typing}


class UnclearTypeError(Exception):
    """The annotation doesn't say which Arrow type is meant."""


# ---------------------------------------------------------------------------------- annotations


_RESOLVED: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()
"""Annotations of functions, as they are written and what they meant where that was asked first."""


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameter and "return" annotations that can be resolved; leave out the others.

    What a text means is found out the first time, while the function around it still runs.
    """
    plain = _written(function)
    known = _RESOLVED.setdefault(plain, {}) if isinstance(plain, types.FunctionType) else {}
    namespace = dict(vars(typing)) | _USUAL_NAMES | getattr(plain, "__globals__", {})
    namespace |= enclosing_names(plain) | closure_values(plain)
    found = {}
    for name, annotation in getattr(plain, "__annotations__", {}).items():
        written, meant = known.get(name, (None, None))
        if name not in known or written is not annotation:
            meant = _evaluated(annotation, namespace)
            if meant is inspect.Parameter.empty:
                continue
            known[name] = (annotation, meant)
        found[name] = type(None) if meant is None else meant
    return found


def unresolved_arrow(function: Callable[..., Any]) -> dict[str, str]:
    """Return the annotations that can't be resolved and name a class of Arrow's, by parameter."""
    raw = getattr(_written(function), "__annotations__", {})
    unclear = {name: raw[name] for name in raw.keys() - annotations_of(function).keys()}
    return {
        name: text
        for name, text in unclear.items()
        if isinstance(text, str) and any(_is_batch_class(word) for word in _NAMES.findall(text))
    }


_NAMES = re.compile(r"\b[A-Z]\w*")


def _is_batch_class(name: str) -> bool:
    kind = getattr(pa, name, None)
    batches = (pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table)
    return isinstance(kind, type) and issubclass(kind, batches)


def _written(function: Any) -> Any:
    """Return the function that has the annotations of a callable."""
    plain = inspect.unwrap(function)
    if isinstance(plain, functools.partial):
        return _written(plain.func)
    if not (inspect.isroutine(plain) or inspect.isclass(plain)):
        plain = type(plain).__call__
    return getattr(plain, "__func__", plain)


def _evaluated(annotation: Any, namespace: Mapping[str, Any]) -> Any:
    """Resolve one annotation, also inside `list["X"]`; `empty` where it can't be."""
    spellings = [annotation]
    if isinstance(annotation, str):
        # `pa.Array[...]` is what type checkers want to read, and an error at run time.
        spellings.append(re.sub(r"(\w+\.\w*Array)\[[^\]]*\]", r"\1", annotation))
    for spelling in spellings:
        carrier = types.FunctionType((lambda: None).__code__, {})
        carrier.__annotations__ = {"it": spelling}
        try:
            return typing.get_type_hints(carrier, dict(namespace), include_extras=True)["it"]
        except Exception:  # noqa: BLE001 - the user's expressions may raise anything
            continue
    return inspect.Parameter.empty


def without_optional(annotation: Any) -> Any:
    """Return X for `X | None` and for `Annotated[X, ...]`."""
    annotation = expanded(annotation)
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = expanded(typing.get_args(annotation)[0])
    member = optional_member(annotation)
    return annotation if member is annotation else without_optional(member)


def optional_member(annotation: Any) -> Any:
    """Return X for `X | None`, and any other annotation as it is."""
    if typing.get_origin(annotation) in _UNIONS:
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        if len(members) == 1:
            return members[0]
    return annotation


def expanded(annotation: Any) -> Any:
    """Return what a `type X = ...` alias stands for (numpy's NDArray is one on newer Pythons)."""
    alias = typing.get_origin(annotation) or annotation
    if type(alias).__name__ != "TypeAliasType":
        return annotation
    arguments = typing.get_args(annotation)
    return expanded(alias.__value__[arguments] if arguments else alias.__value__)


# ------------------------------------------------------------------------- annotation -> Arrow


def arrow_type_of(annotation: Any) -> pa.DataType:
    """Return the Arrow type that an annotation means; raise `UnclearTypeError` if it doesn't say.

    `dict[K, V]` is a map; a TypedDict, dataclass or NamedTuple is a struct; `NDArray[X]` is a
    list of X (one dimension); a pa.DataType inside `Annotated[...]` is taken as it stands.
    """
    return _arrow_type(annotation, ())


def _arrow_type(annotation: Any, inside: tuple[Any, ...]) -> pa.DataType:
    annotation = expanded(annotation)
    if isinstance(annotation, pa.DataType):
        return annotation
    if typing.get_origin(annotation) is typing.Annotated:
        for extra in annotation.__metadata__:
            if isinstance(extra, (pa.DataType, pa.Field)):
                return extra.type if isinstance(extra, pa.Field) else extra
        return _arrow_type(annotation.__origin__, inside)
    annotation = without_optional(annotation)
    annotation = getattr(annotation, "__supertype__", annotation)  # NewType
    if annotation in inside:
        raise UnclearTypeError(f"{_shown(annotation)} contains itself")
    if typing.get_origin(annotation) is not None:
        return _generic_type(annotation, (*inside, annotation))
    if isinstance(annotation, type):
        return _class_type(annotation, (*inside, annotation))
    raise UnclearTypeError(f"{_shown(annotation)} does not stand for one Arrow type")


def _generic_type(annotation: Any, inside: tuple[Any, ...]) -> pa.DataType:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _SEQUENCES or (origin is tuple and arguments[1:] == (...,)):
        return pa.list_(_arrow_type(arguments[0], inside))
    if origin in _MAPPINGS:
        return pa.map_(_arrow_type(arguments[0], inside), _arrow_type(arguments[1], inside))
    if origin is np.ndarray and typing.get_args(arguments[-1]):
        return pa.list_(_arrow_type(typing.get_args(arguments[-1])[0], inside))
    if origin is typing.Literal and len({type(a) for a in arguments}) == 1:
        return _arrow_type(type(arguments[0]), inside)
    raise UnclearTypeError(f"{_shown(annotation)} does not stand for one Arrow type")


def _class_type(annotation: Any, inside: tuple[Any, ...]) -> pa.DataType:
    if annotation in _PLAIN_TYPES:
        return _PLAIN_TYPES[annotation]
    if annotation in _ARRAY_CLASSES:
        return _ARRAY_CLASSES[annotation]
    if annotation is decimal.Decimal:
        raise UnclearTypeError("Decimal does not say its precision and scale")
    if issubclass(annotation, np.generic):
        try:
            return pa.from_numpy_dtype(np.dtype(annotation))
        except (pa.ArrowException, TypeError) as error:
            raise UnclearTypeError(f"{_shown(annotation)} has no Arrow type") from error
    return _struct_type(annotation, inside)


def _struct_type(record: Any, inside: tuple[Any, ...]) -> pa.DataType:
    """Return the struct of a TypedDict's, dataclass's or NamedTuple's fields."""
    hints = hints_of(record)
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
    else:
        names = list(hints if typing.is_typeddict(record) else getattr(record, "_fields", ()))
    if not names or not set(names) <= set(hints):
        raise UnclearTypeError(f"{_shown(record)} does not stand for one Arrow type")
    return pa.struct([(name, _arrow_type(_unmarked(hints[name]), inside)) for name in names])


def hints_of(record: Any) -> dict[str, Any]:
    """Return the annotations of a record's fields, resolved; raise where one can't be."""
    around = enclosing_names(record)
    # Its module may import names for type checkers only, or not be there to look into.
    tries: list[dict[str, Any] | None] = [None, {**vars(typing), **_USUAL_NAMES, **around}]
    reason: Exception | None = None
    for names in [around, *tries] if around else tries:
        try:
            return typing.get_type_hints(record, localns=names, include_extras=True)
        except Exception as error:  # noqa: BLE001  the user's expressions may raise anything
            reason = reason or error
    raise UnclearTypeError(f"{_shown(record)} can't be resolved: {reason}") from reason


def _unmarked(hint: Any) -> Any:
    """Return X for `Required[X]` and `NotRequired[X]`, of typing or typing_extensions."""
    is_marked = str(typing.get_origin(hint)).endswith("Required")
    return typing.get_args(hint)[0] if is_marked else hint


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# ------------------------------------------------------------------- column -> parameter


def is_blob_file(annotation: Any) -> bool:
    """Whether an annotation is Lance's class of files over blobs. Its module is not imported."""
    if not isinstance(annotation, type) or annotation.__name__ != "BlobFile":
        return False
    return annotation.__module__.partition(".")[0] in ("lance", "lancedb")


def accepts(annotation: Any, column: pa.DataType) -> bool:
    """Say whether a parameter so annotated can take this column; True where nothing is said."""
    annotation = expanded(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return accepts(annotation.__origin__, column)
    if typing.get_origin(annotation) in _UNIONS:
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        return any(accepts(member, column) for member in members)
    if isinstance(column, pa.BaseExtensionType) or pt.is_null(column):
        return True
    if is_blob_file(annotation):
        return bool(pt.is_binary(column) or pt.is_large_binary(column))
    if isinstance(annotation, type) and issubclass(annotation, pa.Array):
        return bool(issubclass(type(pa.nulls(0, column)), annotation))
    if pt.is_dictionary(column):
        return accepts(annotation, column.value_type)
    origin = typing.get_origin(annotation) or annotation
    if origin in _SEQUENCES or origin in (tuple, np.ndarray):
        return is_list(column) and _items_accepted(annotation, column)
    if origin in _MAPPINGS or typing.is_typeddict(origin):
        return bool(pt.is_struct(column) or pt.is_map(column))
    check = _value_check(origin)
    return check is None or check(column)


def _items_accepted(annotation: Any, column: pa.DataType) -> bool:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) not in _SEQUENCES or len(arguments) != 1:
        return True
    return accepts(arguments[0], column.value_type)


def _value_check(annotation: Any) -> Callable[[pa.DataType], bool] | None:
    """Return the test of a column's type for a plain class; None for one that says nothing."""
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, np.generic):
        families = ((np.bool_, bool), (np.integer, int), (np.floating, float))
        annotation = next((plain for np_, plain in families if issubclass(annotation, np_)), None)
    checks: dict[Any, Callable[[pa.DataType], bool]] = {
        bool: pt.is_boolean,
        # A Python bool is an int, so a bool column can't break a function of numbers.
        int: lambda t: pt.is_integer(t) or pt.is_boolean(t),
        float: lambda t: pt.is_floating(t) or pt.is_integer(t) or pt.is_boolean(t),
        str: lambda t: pt.is_string(t) or pt.is_large_string(t) or pt.is_string_view(t),
        bytes: is_binary,
        datetime.datetime: pt.is_timestamp,
        datetime.date: lambda t: pt.is_date(t) or pt.is_timestamp(t),
        datetime.time: pt.is_time,
        datetime.timedelta: pt.is_duration,
        decimal.Decimal: pt.is_decimal,
    }
    return checks.get(annotation)


def is_binary(t: pa.DataType) -> bool:
    """Say whether values of this type are bytes."""
    return bool(
        pt.is_binary(t)
        or pt.is_large_binary(t)
        or pt.is_fixed_size_binary(t)
        or pt.is_binary_view(t)
    )


def is_text(t: pa.DataType) -> bool:
    """Say whether values of this type are texts."""
    return bool(pt.is_string(t) or pt.is_large_string(t) or pt.is_string_view(t))


def is_list(t: pa.DataType) -> bool:
    """Say whether values of this type are lists, of whatever layout."""
    return bool(
        pt.is_list(t)
        or pt.is_large_list(t)
        or pt.is_fixed_size_list(t)
        or pt.is_list_view(t)
        or pt.is_large_list_view(t)
    )


# ----------------------------------------------------------------------------- Arrow -> Arrow


def holds(target: pa.DataType, source: pa.DataType) -> bool:
    """Say whether a `target` column holds every value of a `source` array unchanged.

    Layout (large or view types, dictionaries, list kinds, field names inside lists and maps) is
    free; widths may grow and never shrink. Fixed list widths are checked by the cast itself.
    """
    if target == source or pt.is_null(source):
        return True
    if pt.is_dictionary(source) or pt.is_dictionary(target):
        plain = [t.value_type if pt.is_dictionary(t) else t for t in (target, source)]
        return holds(*plain)
    if is_list(target) and is_list(source):
        widths = {t.list_size for t in (target, source) if pt.is_fixed_size_list(t)}
        return len(widths) < 2 and holds(target.value_type, source.value_type)
    if pt.is_map(target) and pt.is_map(source):
        keys = holds(target.key_type, source.key_type)
        return keys and holds(target.item_type, source.item_type)
    if pt.is_struct(target) and pt.is_struct(source):
        names = [[field.name for field in t] for t in (target, source)]
        return names[0] == names[1] and all(
            holds(a.type, b.type) for a, b in zip(target, source, strict=True)
        )
    if is_text(source):
        return is_text(target)
    if is_binary(source):
        return is_binary(target) and not pt.is_fixed_size_binary(target)
    return _wider_number(target, source) or _finer_time(target, source)


def _wider_number(target: pa.DataType, source: pa.DataType) -> bool:
    if pt.is_integer(source) and pt.is_integer(target):
        if pt.is_unsigned_integer(source) == pt.is_unsigned_integer(target):
            return bool(target.bit_width >= source.bit_width)
        return pt.is_signed_integer(target) and bool(target.bit_width > source.bit_width)
    if pt.is_floating(source) and pt.is_floating(target):
        return bool(target.bit_width >= source.bit_width)
    if pt.is_integer(source) and pt.is_floating(target):
        mantissa = {16: 11, 32: 24, 64: 53}[target.bit_width]
        return bool(source.bit_width <= mantissa)
    if pt.is_decimal(source) and pt.is_decimal(target):
        whole = target.precision - target.scale >= source.precision - source.scale
        return whole and bool(target.scale >= source.scale)
    return False


def _finer_time(target: pa.DataType, source: pa.DataType) -> bool:
    units = ("s", "ms", "us", "ns")
    same_kind = any(
        check(target) and check(source) for check in (pt.is_timestamp, pt.is_time, pt.is_duration)
    )
    if not same_kind or getattr(target, "tz", None) != getattr(source, "tz", None):
        return False
    return units.index(target.unit) >= units.index(source.unit)
