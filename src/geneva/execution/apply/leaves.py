"""The leaves of values: numbers, texts and times as Arrow stores them, exactly or not at all.

Each family of Arrow types names the Python types that it takes. Values that are all of the usual
one go to pyarrow as they are; any other is first made one of these, or refused.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from geneva.execution.apply.tensors import numpy_of
from geneva.render.text import a_type
from geneva.udf.types import is_binary, is_text

Prepare = Callable[[Any], Any]

_NONE = type(None)
_NUMPY_INTS = frozenset(np.dtype(code).type for code in "bBhHiIlLqQ")


def unboxed(value: Any) -> Any:
    """Return a value without its wrapping: an Arrow scalar, a 0-d array, a mark for NULL."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if value is np.ma.masked or is_missing(value):
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return unboxed(value[()])
    if hasattr(value, "__array__") and getattr(value, "ndim", None) == 0:
        return value if isinstance(value, np.generic) else np.asarray(numpy_of(value))[()]
    return value


def is_missing(value: Any) -> bool:
    """Say whether a value is None, NA or NaT. NaN is a float like any other."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, (np.datetime64, np.timedelta64)) and bool(np.isnat(value))


def leaf_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Return Python values as an array of a type that is not nested."""
    if pt.is_floating(kind):
        return _floats(values, kind)
    usual, prepare = _family(kind)
    if prepare is None:
        return pa.array(values, kind)
    kinds = set(map(type, values))
    if not kinds <= usual and not _are_usual_times(values, kinds, kind):
        plain = [v if type(v) in usual else unboxed(v) for v in values]
        values = [v if v is None or type(v) in usual else prepare(v) for v in plain]
    return pa.array(values, kind)


def _family(kind: pa.DataType) -> tuple[frozenset[type], Prepare | None]:
    """Return the types that pyarrow takes exactly for `kind`, and what is done with others."""
    if pt.is_integer(kind):
        return frozenset({int, _NONE}) | _NUMPY_INTS, _whole_number
    if pt.is_boolean(kind):
        return frozenset({bool, _NONE}), _truth
    if is_text(kind):
        return frozenset({str, _NONE}), _text
    if is_binary(kind):
        return frozenset({bytes, _NONE}), lambda value: _bytes(value, kind)
    if pt.is_decimal(kind):
        return frozenset({int, decimal.Decimal, _NONE}), _decimal
    if pt.is_temporal(kind) and not pt.is_interval(kind):
        return frozenset({_NONE}), lambda value: _ticks(value, kind)
    return frozenset(), None


# ------------------------------------------------------------------------------ numbers


def _whole_number(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a bool is not a number here; return int(...)")
    if isinstance(value, (float, np.floating, decimal.Decimal)):
        if not np.isfinite(float(value)) or value != int(value):
            raise TypeError(f"{value} is not a whole number")
        return int(value)
    # numpy takes a timedelta64 for an integer.
    if isinstance(value, np.timedelta64) or not hasattr(value, "__index__"):
        raise TypeError(f"{a_type(value)} is not a whole number")
    return int(value.__index__())


def _decimal(value: Any) -> decimal.Decimal | int:
    if isinstance(value, (float, np.floating)):
        raise TypeError("a float is not a decimal number; return a Decimal")
    return value if isinstance(value, decimal.Decimal) else _whole_number(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, np.bool_):
        raise TypeError(f"{a_type(value)} is neither True nor False")
    return bool(value)


def _floats(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    kinds = set(map(type, values))
    if not kinds <= {float, int, np.float64, np.float32, _NONE}:
        plain = [v if type(v) is float else unboxed(v) for v in values]
        values = [v if v is None or type(v) in (float, int) else _number(v) for v in plain]
        kinds = set(map(type, values))
    if int in kinds:
        whole = [v for v in values if type(v) is int]
        if max(map(abs, whole)) >= 2 ** _MANTISSA_BITS[kind.bit_width]:
            values = [_exact_float(v, kind) if type(v) is int else v for v in values]
    doubles = pa.array(values, pa.float64())
    if pt.is_float64(kind):
        return doubles
    narrow = pa.array(_narrowed(doubles.to_numpy(zero_copy_only=False), kind), kind)
    return pc.if_else(doubles.is_valid(), narrow, None) if doubles.null_count else narrow


_MANTISSA_BITS = {16: 11, 32: 24, 64: 53}


def _number(value: Any) -> int | float:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a bool is not a number here; return float(...)")
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if np.isinf(number) and not np.isinf(value):  # a longdouble
            raise ValueError(f"{value} is too large for a double")
        return number
    if isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64):
        return int(value)
    raise TypeError(f"{a_type(value)} is not a float")


def _exact_float(value: int, kind: pa.DataType) -> float:
    """Return an int as the float that equals it."""
    number = float(value)
    with np.errstate(over="ignore"):
        stored = float(kind.to_pandas_dtype()(number))
    if number != value or stored != value:
        raise ValueError(f"{value} is not exactly a {kind}")
    return number


def _narrowed(numbers: npt.NDArray[Any], kind: pa.DataType) -> npt.NDArray[Any]:
    """Return floats in the width of `kind`, rounded; none becomes infinite by it."""
    dtype = np.dtype(kind.to_pandas_dtype())
    if numbers.dtype == dtype:
        return numbers
    with np.errstate(over="ignore", under="ignore"):
        narrow = numbers.astype(dtype)
    if dtype.itemsize < numbers.dtype.itemsize:
        lost = np.isinf(narrow) & ~np.isinf(numbers)
        if lost.any():
            raise ValueError(f"{numbers[lost][0]} is too large for a {kind}")
    return narrow


# ------------------------------------------------------------------------------ texts


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{a_type(value)} is not a text")
    return value


def _bytes(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, uuid.UUID) and pt.is_fixed_size_binary(kind):
        return value.bytes
    if not isinstance(value, (bytes, bytearray, memoryview, pa.Buffer)):
        raise TypeError(f"{a_type(value)} is not bytes")
    return bytes(value)


# ------------------------------------------------------------------------------ times

_UNITS = {"as": 1, "fs": 10**3, "ps": 10**6, "ns": 10**9, "us": 10**12, "ms": 10**15, "s": 10**18}
_UNITS |= {"m": 60 * 10**18, "h": 3_600 * 10**18, "D": 86_400 * 10**18, "W": 604_800 * 10**18}
"""Attoseconds in the units of numpy and Arrow: with them, all of this is whole numbers."""
_DAY = _UNITS["D"]
_UTC_NAMES = ("UTC", "Etc/UTC", "Z", "+00:00", "GMT", "Etc/GMT", "Zulu", "Etc/UCT", "UCT")


def _are_usual_times(values: Sequence[Any], kinds: set[type], kind: pa.DataType) -> bool:
    """Say whether all values are Python's own times, of which pyarrow loses nothing here."""
    kinds = kinds - {_NONE}
    if pt.is_date(kind):
        return kinds == {datetime.date}
    if not pt.is_temporal(kind) or kind.unit not in ("us", "ns"):
        return False
    if pt.is_duration(kind):
        return kinds == {datetime.timedelta}
    if kinds != {datetime.time if pt.is_time(kind) else datetime.datetime}:
        return False
    zones = {value.tzinfo for value in values if value is not None}
    if pt.is_time(kind) or kind.tz is None:
        return zones == {None}
    return None not in zones


def _ticks(value: Any, kind: pa.DataType) -> int:
    """Return a point or span of time as a count of the column's units since 1970 or midnight."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64)):
        return _counted(int(value), kind)
    length = _UNITS["ms"] if pt.is_date64(kind) else _DAY
    if not pt.is_date(kind):
        length = _UNITS[kind.unit]
    attoseconds = _attoseconds(value, kind)
    if attoseconds is None:
        raise TypeError(f"{a_type(value)} is no {kind}")
    if attoseconds % length or (pt.is_date(kind) and attoseconds % _DAY):
        name = "day" if pt.is_date(kind) else kind.unit
        raise ValueError(f"it is finer than the column's unit ({name})")
    return attoseconds // length


def _counted(count: int, kind: pa.DataType) -> int:
    """Return a count of the column's own units, as Arrow stores it."""
    if pt.is_time(kind) and not 0 <= count < _DAY // _UNITS[kind.unit]:
        raise ValueError(f"{count} {kind.unit} is no time of a day")
    if pt.is_date64(kind) and count % 86_400_000:
        raise ValueError("it is finer than the column's unit (day)")
    return count


def _attoseconds(value: Any, kind: pa.DataType) -> int | None:
    """Return a time of the sort that `kind` is about, since 1970 or midnight; None for others."""
    if pt.is_duration(kind):
        if isinstance(value, datetime.timedelta):
            return _span(value)
        return _numpy_time(value) if isinstance(value, np.timedelta64) else None
    if pt.is_time(kind):
        if not isinstance(value, datetime.time):
            return None
        if value.tzinfo is not None:
            raise TypeError("a time of day with a zone loses it; return it without")
        hours = datetime.timedelta(hours=value.hour, minutes=value.minute, seconds=value.second)
        return _span(hours + datetime.timedelta(microseconds=value.microsecond))
    if pt.is_date(kind):
        if isinstance(value, datetime.datetime):
            raise TypeError("a datetime has a time of day, the column does not; return .date()")
        if isinstance(value, datetime.date):
            return _span(value - datetime.date(1970, 1, 1))
        return _numpy_time(value) if isinstance(value, np.datetime64) else None
    if isinstance(value, datetime.datetime):
        _check_zone(kind, value.utcoffset())
        to_python = getattr(value, "to_pydatetime", None)
        if to_python is None:
            return _since_1970(value)
        nanoseconds: int = getattr(value, "nanosecond", 0)  # pandas has them, Python has not
        return _since_1970(to_python(warn=False)) + nanoseconds * _UNITS["ns"]
    if isinstance(value, np.datetime64):
        _check_zone(kind, None)
        return _numpy_time(value)
    return None


def _check_zone(kind: pa.DataType, offset: datetime.timedelta | None) -> None:
    """Refuse a time whose clock would read differently; `offset` is None where it has no zone.

    Arrow takes a time without a zone for UTC, and so do we, where it will read the same.
    """
    if offset is None and kind.tz is not None and kind.tz not in _UTC_NAMES:
        raise TypeError(f"a time without a zone is not one in {kind.tz}; give it a tzinfo")
    if kind.tz is None and offset:
        raise TypeError(
            "a time in another zone than UTC, and the column has none; convert it, or declare "
            "pa.timestamp(..., tz=...)"
        )


def _since_1970(value: datetime.datetime) -> int:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=None if value.tzinfo is None else datetime.UTC)
    return _span(value - epoch)


def _span(value: datetime.timedelta) -> int:
    seconds = value.days * 86_400 + value.seconds
    nanoseconds = getattr(value, "nanoseconds", 0)  # a pandas Timedelta
    return seconds * _UNITS["s"] + value.microseconds * _UNITS["us"] + nanoseconds * _UNITS["ns"]


def _numpy_time(value: Any) -> int | None:
    unit, step = np.datetime_data(value.dtype)
    if unit in ("Y", "M") and isinstance(value, np.datetime64):
        value, unit, step = value.astype("datetime64[D]"), "D", 1
    if unit not in _UNITS:
        return None
    return int(value.astype(np.int64)) * step * _UNITS[unit]


# ------------------------------------------------------------------------------ numpy


def numpy_leaf(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Return a numpy array with one dimension as an array of a type that is not nested."""
    if not numbers.dtype.isnative:
        numbers = numbers.astype(numbers.dtype.newbyteorder("="))
    code = numbers.dtype.kind
    if code in "iuf" and pt.is_floating(kind):
        return _numpy_floats(numbers, kind)
    if code in "iu" and pt.is_integer(kind):
        return pa.array(numbers).cast(kind)
    if code == "f" and pt.is_integer(kind):
        return _numpy_whole_numbers(numbers, kind)
    if code == "b" and pt.is_boolean(kind):
        return pa.array(numbers)
    if code in "mM" and _has_arrow_unit(numbers.dtype):
        same = pt.is_timestamp(kind) if code == "M" else pt.is_duration(kind)
        if same:
            return _numpy_times(numbers, kind)
    if code in "SU":  # Arrow ends these at their first NUL character
        return leaf_array(numbers.tolist(), kind)
    if code in "bcV":
        raise TypeError(f"items of {numbers.dtype} can't be stored as {kind}")
    return leaf_array(list(numbers), kind)


def _numpy_floats(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if numbers.dtype.kind == "f":
        return pa.array(_narrowed(numbers, kind), kind)
    bits = _MANTISSA_BITS[kind.bit_width]
    with np.errstate(over="ignore"):
        floats = numbers.astype(kind.to_pandas_dtype())
    if numbers.dtype.itemsize * 8 > bits:
        # Exact are the ints whose digits, without the zeros behind them, fit into the mantissa.
        size = np.where(numbers < 0, -numbers.astype(np.uint64), numbers.astype(np.uint64))
        last = size & -size
        inexact = (size // np.maximum(last, 1) >= 2**bits) | np.isinf(floats)
        if inexact.any():
            raise ValueError(f"{numbers[inexact][0]} is not exactly a {kind}")
    return pa.array(floats, kind)


def _numpy_whole_numbers(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if numbers.dtype.itemsize < 8:
        numbers = numbers.astype(np.float64)
    bounds = np.iinfo(kind.to_pandas_dtype())
    fits = (numbers >= float(bounds.min)) & (numbers < float(bounds.max) + (bounds.bits < 64))
    fits &= np.trunc(numbers) == numbers
    if not fits.all():
        raise TypeError(f"{numbers[~fits][0]} is not a whole number that a {kind} can hold")
    return pa.array(numbers.astype(kind.to_pandas_dtype()))


def _has_arrow_unit(dtype: np.dtype[Any]) -> bool:
    unit, step = np.datetime_data(dtype)
    return unit in ("s", "ms", "us", "ns") and step == 1


def _numpy_times(times: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if pt.is_duration(kind):
        return pa.array(times).cast(kind)
    if not np.isnat(times).all():
        _check_zone(kind, None)
    return pa.array(times).cast(pa.timestamp(kind.unit)).view(kind)
