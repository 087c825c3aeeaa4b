"""Whatever a function returns is stored as it is or refused: checked against a slow, exact oracle.

The oracle thinks in fractions. It knows nothing of numpy, pandas or Arrow but how many bits there
are, so that what is stored can be compared with what was meant.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as pt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from geneva.execution.apply.output import result_to_array, values_to_array

UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=2))


class RefusedError(Exception):
    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def refuse(row: int | None, problem: str) -> NoReturn:
    raise RefusedError(row, problem)


# ------------------------------------------------------------------------------ the oracle

NO = object()
"""The value doesn't fit."""
UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
UNITS |= {"ns": Fraction(1, 10**9), "D": Fraction(86_400), "h": Fraction(3_600)}
DAY = UNITS["D"]


@dataclass(frozen=True)
class Moment:
    """A point (or, for a `sort` of "span" or "clock", a length) of time, in seconds."""

    seconds: Fraction
    sort: str
    offset: int | None = None
    """Seconds east of UTC; None without a zone."""


@dataclass(frozen=True)
class Number:
    """A number: "int", "float" or "decimal"; NaN and infinities are floats."""

    value: Fraction | float
    sort: str


def stored(meant: Any, kind: pa.DataType) -> Any:
    """Return what a column of this type holds for what was meant, or NO."""
    if meant is None:
        return None
    if pt.is_dictionary(kind):
        return stored(meant, kind.value_type)
    if pt.is_struct(kind):
        if not isinstance(meant, dict) or set(meant) - {f.name for f in kind}:
            return NO
        fields = {f.name: stored(meant.get(f.name), f.type) for f in kind}
        return NO if any(v is NO for v in fields.values()) else fields
    if pt.is_map(kind):
        if not isinstance(meant, dict):
            return NO
        pairs = [(stored(k, kind.key_type), stored(v, kind.item_type)) for k, v in meant.items()]
        return NO if any(NO in pair for pair in pairs) else pairs
    if isinstance(meant, dict):
        return NO
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        if not isinstance(meant, list):
            return NO
        if pt.is_fixed_size_list(kind) and len(meant) != kind.list_size:
            return NO
        items = [stored(item, kind.value_type) for item in meant]
        return NO if any(item is NO for item in items) else items
    return stored_leaf(meant, kind)


def stored_leaf(meant: Any, kind: pa.DataType) -> Any:
    if pt.is_temporal(kind):
        return stored_time(meant, kind)
    if isinstance(meant, Number):
        return stored_number(meant, kind)
    if pt.is_boolean(kind):
        return meant if isinstance(meant, bool) else NO
    if pt.is_string(kind) or pt.is_large_string(kind):
        return meant if isinstance(meant, str) else NO
    if pt.is_binary(kind):
        return meant if isinstance(meant, bytes) else NO
    return NO


def stored_number(meant: Number, kind: pa.DataType) -> Any:
    value = meant.value
    if pt.is_integer(kind):
        signed = pt.is_signed_integer(kind)
        low, high = (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))
        if not signed:
            low, high = 0, 2**kind.bit_width
        if not isinstance(value, Fraction) or value.denominator != 1:
            return NO
        return int(value) if low <= value < high else NO
    if pt.is_floating(kind) and meant.sort != "decimal":
        if not isinstance(value, Fraction):
            return value
        with np.errstate(over="ignore"):
            found = float(kind.to_pandas_dtype()(float(value)))
        if math.isinf(found) or (meant.sort == "int" and Fraction(found) != value):
            return NO
        return found
    if pt.is_decimal(kind) and meant.sort != "float":
        assert isinstance(value, Fraction)
        scaled = value * 10**kind.scale
        fits = scaled.denominator == 1 and abs(scaled) < 10**kind.precision
        return value if fits else NO
    return NO


def stored_time(meant: Any, kind: pa.DataType) -> Any:
    """Return the count of the column's units."""
    unit = UNITS["D"] if pt.is_date(kind) else UNITS[kind.unit]
    if isinstance(meant, Number) and meant.sort == "int":
        count = meant.value
        if pt.is_date64(kind):  # stored in milliseconds, of whole days
            count = count / 86_400_000 if -(2**63) <= count < 2**63 else Fraction(1, 2)
        if pt.is_time(kind) and not 0 <= count < DAY / unit:
            return NO
    elif isinstance(meant, Moment):
        sorts = {"point"} if pt.is_timestamp(kind) else {"date", "numpy point"}
        if pt.is_timestamp(kind):
            sorts = {"point", "numpy point"}
        elif pt.is_duration(kind):
            sorts = {"span"}
        elif pt.is_time(kind):
            sorts = {"clock"}
        if meant.sort not in sorts:
            return NO
        if pt.is_timestamp(kind):
            if kind.tz is None and meant.offset:
                return NO
            if kind.tz not in (None, "UTC") and meant.offset is None:
                return NO
        count = meant.seconds / unit
    else:
        return NO
    bits = 32 if kind.bit_width == 32 else 64
    fits = Fraction(count).denominator == 1 and -(2 ** (bits - 1)) <= count < 2 ** (bits - 1)
    return int(count) if fits else NO


def read_back(array: pa.Array) -> list[Any]:
    """Return what is stored, in the oracle's terms."""
    kind = array.type
    valid = array.is_valid().to_pylist()
    if pt.is_dictionary(kind):
        return read_back(array.dictionary_decode())
    if pt.is_struct(kind):
        children = {f.name: read_back(array.field(i)) for i, f in enumerate(kind)}
        rows: list[Any] = [{n: c[i] for n, c in children.items()} for i in range(len(array))]
    elif pt.is_map(kind):
        keys, items, ends = read_back(array.keys), read_back(array.items), array.offsets.to_pylist()
        pairs = list(zip(keys, items, strict=True))
        rows = [pairs[ends[i] : ends[i + 1]] for i in range(len(array))]
    elif pt.is_list(kind) or pt.is_large_list(kind):
        items, ends = read_back(array.values), array.offsets.to_pylist()
        rows = [items[ends[i] : ends[i + 1]] for i in range(len(array))]
    elif pt.is_fixed_size_list(kind):
        items, size = read_back(array.values), kind.list_size
        rows = [items[i * size : (i + 1) * size] for i in range(len(array))]
    elif pt.is_date64(kind):
        rows = [None if v is None else v // 86_400_000 for v in array.view(pa.int64()).to_pylist()]
    elif pt.is_temporal(kind):
        rows = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    elif pt.is_decimal(kind):
        rows = [None if v is None else Fraction(v) for v in array.to_pylist()]
    else:
        rows = array.to_pylist()
    return [row if ok else None for row, ok in zip(rows, valid, strict=True)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or a == b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


# ------------------------------------------------------------------------------ types and values
# A value is a pair: what the function returns, and what is meant by it.

LEAVES = st.sampled_from(
    [
        *(pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.decimal128(6, 2)),
        *(pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
        *(pa.timestamp("us", "UTC"), pa.timestamp("ns", "Europe/Berlin")),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        pa.dictionary(pa.int16(), pa.string()),
        pa.dictionary(pa.int8(), pa.int64()),
    ]
)
KINDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda item: pa.list_(item, 2)),
        st.tuples(inner, inner).map(lambda t: pa.struct([("a", t[0]), ("b", t[1])])),
        inner.map(lambda item: pa.map_(pa.string(), item)),
    ),
    max_leaves=3,
)


def number(value: Any, sort: str) -> Number:
    finite = sort != "float" or math.isfinite(value)
    return Number(Fraction(value) if finite else float(value), sort)


BOUNDS = [2**7, 2**8, 2**11 + 1, 2**24 + 1, 2**31, 2**53 + 1, 2**60, 2**63, 2**64, 10**30]
INTS = st.integers(-130, 260) | st.sampled_from(
    [b - d for b in BOUNDS for d in (0, 1)] + [-(2**63)]
)
FLOATS = st.sampled_from([0.0, 1.0, 1.5, 0.1, 255.0, 7e4, 1e300, 2.0**63, math.nan, math.inf])
NUMPY_INTS = [np.int8, np.uint8, np.int32, np.int64, np.uint64]
MICROS = st.integers(-(10**15), 10**15) | st.integers(-3, 3).map(lambda d: d * 86_400 * 10**6)
TICKS = st.integers(-3, 3).map(lambda n: n * 1_000) | st.integers(-(10**15), 10**15)
TIME_UNITS = st.sampled_from(["s", "ms", "us", "ns", "h", "D"])


def clipped(value: int, dtype: Any) -> Any:
    info = np.iinfo(dtype)
    return dtype(min(max(value, int(info.min)), int(info.max)))


def of_datetime(micros: int, zone: datetime.timezone | None, nanos: int) -> tuple[Any, Any]:
    naive = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=micros)  # noqa: DTZ001
    offset = None if zone is None else int(zone.utcoffset(None).total_seconds())
    seconds = Fraction(micros, 10**6) - (offset or 0)
    value = naive.replace(tzinfo=zone)
    if nanos:
        value = pd.Timestamp(value) + pd.Timedelta(nanos, "ns")
    return value, Moment(seconds + Fraction(nanos, 10**9), "point", offset)


def of_numpy_time(ticks: int, unit: str, code: str) -> tuple[Any, Any]:
    ticks = ticks // 10**9 if unit in ("h", "D") else ticks
    sort = "numpy point" if code == "M" else "span"
    value = np.datetime64(ticks, unit) if code == "M" else np.timedelta64(ticks, unit)
    return value, Moment(ticks * UNITS[unit], sort)


LEAF_VALUES: st.SearchStrategy[tuple[Any, Any]] = st.one_of(
    INTS.map(lambda v: (v, number(v, "int"))),
    st.tuples(INTS, st.sampled_from(NUMPY_INTS)).map(
        lambda t: (clipped(*t), number(int(clipped(*t)), "int"))
    ),
    FLOATS.map(lambda v: (v, number(v, "float"))),
    FLOATS.map(lambda v: (np.float64(v), number(v, "float"))),
    st.sampled_from(["5.9", "5", "1.25", "1.250", "1.234", "1E+20"]).map(
        lambda v: (decimal.Decimal(v), number(decimal.Decimal(v), "decimal"))
    ),
    st.sampled_from([True, False]).map(lambda v: (v, v)),
    st.sampled_from([True, False]).map(lambda v: (np.bool_(v), v)),
    st.sampled_from(["", "abc", "é"]).map(lambda v: (v, v)),
    st.sampled_from([b"", b"abc", b"\xff"]).map(lambda v: (v, v)),
    st.sampled_from([None, pd.NA, pd.NaT, np.datetime64("NaT", "ns"), np.ma.masked]).map(
        lambda v: (v, None)
    ),
    st.sampled_from([1 + 0j, np.complex64(2), object(), {1}, Fraction(1, 2)]).map(
        lambda v: (v, NO)
    ),
    st.tuples(MICROS, st.sampled_from([None, UTC, EAST]), st.sampled_from([0, 0, 5])).map(
        lambda t: of_datetime(*t)
    ),
    st.tuples(TICKS, TIME_UNITS, st.sampled_from("Mm")).map(lambda t: of_numpy_time(*t)),
    st.integers(-3, 3).map(
        lambda d: (datetime.date.fromordinal(719_163 + d), Moment(d * DAY, "date"))
    ),
    MICROS.map(lambda v: (datetime.timedelta(microseconds=v), Moment(Fraction(v, 10**6), "span"))),
    st.sampled_from([0, 1, 1_000, 1_000_000]).map(
        lambda v: (
            datetime.time(1, 0, v // 10**6, v % 10**6),
            Moment(3600 + Fraction(v, 10**6), "clock"),
        )
    ),
)


def wrapped(items: list[tuple[Any, Any]], make: str) -> tuple[Any, Any]:
    """Return the items as a list of some make, with what is meant by it."""
    given_items, meant = [i[0] for i in items], [i[1] for i in items]
    if make == "tuple":
        return tuple(given_items), meant
    if make in ("series", "object array"):
        array = np.empty(len(items), object)
        array[:] = given_items
        if make == "object array":
            return array, meant
        # In pandas, NaN in a Series of objects is a missing value.
        nan = [isinstance(v, float) and math.isnan(v) for v in given_items]
        return pd.Series(array, dtype=object), [
            None if no else m for m, no in zip(meant, nan, strict=True)
        ]
    return given_items, meant


def numpy_row(values: list[int], dtype: str, make: str) -> tuple[Any, Any]:
    """Return a typed numpy array (or what is made from one), with what is meant by it."""
    code, unit = dtype[0], dtype[3:-1]
    if code in "iu":
        info = np.iinfo(dtype)
        values = [min(max(v, int(info.min)), int(info.max)) for v in values]
        meant: list[Any] = [number(v, "int") for v in values]
    elif code == "f":
        values = [v / 2 for v in values]  # type: ignore[misc]
        with np.errstate(over="ignore"):
            meant = [number(float(v), "float") for v in np.array(values, dtype)]
    elif code == "b":
        meant = [bool(v % 2) for v in values]
        values = [v % 2 for v in values]
    elif code == "c":
        meant = [NO for _ in values]
    else:
        values = [v % 10**12 for v in values]
        if unit in ("h", "D"):
            values = [v % 10**5 for v in values]
        sort = "numpy point" if code == "M" else "span"
        meant = [Moment(v * UNITS[unit], sort) for v in values]
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    if make == "masked" and len(values):
        return np.ma.array(array, mask=[True] + [False] * (len(values) - 1)), [None, *meant[1:]]
    if make == "series" and code not in "c" and unit not in ("h", "D"):
        return pd.Series(array), meant
    if make == "index" and code in "mM" and unit not in ("h", "D"):
        return pd.Index(array), meant
    if make == "arrow" and code not in "cf" and unit not in ("h", "D"):
        meant = [Moment(m.seconds, "point") if code == "M" else m for m in meant]
        return pa.array(array), meant
    return array, meant


DTYPES = ["i1", "i8", "u8", "f4", "f8", "f2", "bool", "c16"]
DTYPES += [f"{code}8[{unit}]" for code in "Mm" for unit in ("s", "ms", "us", "ns", "h", "D")]
NUMPY_ROWS = st.builds(
    numpy_row,
    st.lists(INTS, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "masked", "series", "index", "arrow"]),
)


@st.composite
def values_for(draw: st.DrawFn, kind: pa.DataType) -> tuple[Any, Any]:
    """Return a value that may well fit a type: of its shape, with leaves of any sort."""
    if draw(st.integers(0, 12)) == 0:
        return draw(LEAF_VALUES)
    if pt.is_struct(kind):
        fields = [f for f in kind if draw(st.integers(0, 5))]
        pairs = {f.name: draw(values_for(f.type)) for f in fields}
        if not draw(st.integers(0, 15)):
            pairs["c"] = (1, number(1, "int"))
        return {n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}
    if pt.is_map(kind):
        keys = draw(st.lists(st.sampled_from(["k", "l"]), unique=True))
        entries = {k: draw(values_for(kind.item_type)) for k in keys}
        given_map = {k: v[0] for k, v in entries.items()}
        is_dict = draw(st.booleans())
        as_given = given_map if is_dict else list(given_map.items())
        return as_given, {k: v[1] for k, v in entries.items()}
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        if draw(st.booleans()):
            return draw(NUMPY_ROWS)
        items = draw(st.lists(values_for(kind.value_type), max_size=3))
        make = draw(st.sampled_from(["list", "tuple", "series", "object array"]))
        return wrapped(items, make)
    return draw(LEAF_VALUES)


@st.composite
def typed_rows(draw: st.DrawFn) -> tuple[pa.DataType, list[tuple[Any, Any]]]:
    kind = draw(KINDS)
    return kind, draw(st.lists(values_for(kind), min_size=1, max_size=4))


def converted(make: Callable[[], pa.Array]) -> tuple[pa.Array | None, int | None]:
    """Return the array, or the row that was refused."""
    try:
        array = make()
    except RefusedError as refused:
        return None, -1 if refused.row is None else refused.row
    array.validate(full=True)
    return array, None


@pytest.mark.slow
@settings(max_examples=200)
@given(typed_rows())
@example((pa.float32(), [(2**24 + 1, Number(Fraction(2**24 + 1), "int"))]))
@example((pa.list_(pa.int8()), [(np.array([], bool), [])]))
@example((pa.int64(), [(np.timedelta64(1, "s"), Moment(Fraction(1), "span"))]))
@example((pa.float16(), [(np.timedelta64(1, "s"), Moment(Fraction(1), "span"))]))
def test_every_value_is_stored_as_it_is_or_refused_with_its_row(
    case: tuple[pa.DataType, list[tuple[Any, Any]]],
) -> None:
    kind, rows = case
    values, meant = [r[0] for r in rows], [r[1] for r in rows]
    expected = [NO if m is NO else stored(m, kind) for m in meant]
    wrong = next((row for row, value in enumerate(expected) if value is NO), None)
    array, row = converted(lambda: values_to_array(values, kind, refuse))
    assert row == wrong
    if array is not None:
        assert array.type == kind
        assert same(read_back(array), expected)
    objects = np.empty(len(values), object)
    objects[:] = values
    results: list[Any] = [list(values), tuple(values), iter(values), objects]
    for result in results:
        again, row = converted(lambda result=result: result_to_array(result, kind, refuse))
        assert row == wrong
        assert array is None or (again is not None and same(read_back(again), expected))


@given(typed_rows())
def test_a_value_is_stored_alone_as_among_others(
    case: tuple[pa.DataType, list[tuple[Any, Any]]],
) -> None:
    kind, rows = case
    values = [r[0] for r in rows]
    whole, _ = converted(lambda: values_to_array(values, kind, refuse))
    alone = [converted(lambda v=v: values_to_array([v], kind, refuse))[0] for v in values]
    if whole is not None:
        assert all(one is not None for one in alone)
        assert same([read_back(one)[0] for one in alone if one is not None], read_back(whole))
    else:
        assert None in alone


# ------------------------------------------------------------------------------ by name

DAY_ONE = datetime.datetime(2024, 1, 2, 3, 4, 5, 678_000)  # noqa: DTZ001


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("column", ["ms", "us", "ns"])
def test_times_in_lists_keep_their_unit(unit: str, column: str) -> None:
    exact = DAY_ONE.replace(microsecond=0)
    points = np.array([exact], f"M8[{unit}]")
    spans = np.array([90], "m8[s]").astype(f"m8[{unit}]")
    kinds = [pa.list_(pa.timestamp(column)), pa.list_(pa.timestamp(column), 1)]
    for kind in kinds:
        for row in (points, pd.Series(points), pd.DatetimeIndex(points), list(points)):
            array = values_to_array([row, None], kind, refuse)
            assert array.cast(pa.list_(pa.timestamp("us"))).to_pylist() == [[exact], None]
    for row in (spans, pd.Series(spans), pd.TimedeltaIndex(spans), list(spans)):
        array = values_to_array(
            [{"d": row}], pa.struct({"d": pa.list_(pa.duration(column))}), refuse
        )
        in_seconds = array.field("d").cast(pa.list_(pa.duration("s")))
        assert in_seconds.to_pylist() == [[datetime.timedelta(seconds=90)]]


def test_a_time_that_is_too_fine_is_refused() -> None:
    fine = np.array(["2024-01-02T03:04:05.000000001"], "M8[ns]")
    for value in (fine, list(fine), pd.Series(fine), pd.DatetimeIndex(fine)):
        with pytest.raises(RefusedError) as caught:
            values_to_array([None, value], pa.list_(pa.timestamp("us")), refuse)
        assert caught.value.row == 1


DICTIONARY = pa.dictionary(pa.int8(), pa.string())


def _many(n: int) -> list[str]:
    return [f"v{i}" for i in range(n)]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (DICTIONARY, lambda v: v),
        (pa.list_(DICTIONARY), lambda v: [v]),
        (pa.struct({"d": DICTIONARY}), lambda v: {"d": v}),
        (pa.map_(pa.string(), DICTIONARY), lambda v: {"k": v}),
    ],
    ids=["plain", "list", "struct", "map"],
)
def test_a_dictionary_with_too_many_values_is_refused(
    kind: pa.DataType, make: Callable[[str], Any]
) -> None:
    fitting = [make(v) for v in _many(128)]
    assert values_to_array(fitting, kind, refuse).type == kind
    with pytest.raises(RefusedError, match="128 different values") as caught:
        values_to_array([make(v) for v in _many(300)], kind, refuse)
    assert caught.value.row == 128


def test_a_dictionary_array_with_too_many_values_is_refused() -> None:
    for result in (pa.array(_many(300)), pa.array(_many(300)).dictionary_encode()):
        with pytest.raises(RefusedError) as caught:
            result_to_array(result, DICTIONARY, refuse)
        assert caught.value.row == 128
    unused = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array(_many(300)))
    array = result_to_array(unused, DICTIONARY, refuse)
    assert (array.to_pylist(), len(array.dictionary)) == (["v1", "v0"], 2)


@pytest.mark.parametrize(
    ("kind", "result", "row"),
    [
        (pa.int64(), pd.Series([1.5, None], dtype=object), 0),
        (pa.int64(), pd.Series([1, None, decimal.Decimal("5.9")], dtype=object), 2),
        (pa.int64(), pd.Index([1, 1.5], dtype=object), 1),
        (pa.list_(pa.string()), pd.Series([["a"], "abc"], dtype=object), 1),
        (pa.map_(pa.string(), pa.int64()), pd.Series([{"a": 1}, {"a": 1.5}]), 1),
        (pa.list_(pa.float32(), 2), pa.array([[1.0, 2.0], [1.0]], pa.list_(pa.float32())), 1),
        (pa.timestamp("ns"), pa.array([0, 2**62], pa.timestamp("s")), 1),
    ],
    ids=["float", "decimal", "index", "letters", "map", "width", "range"],
)
def test_what_does_not_fit_in_a_batch_names_its_row(
    kind: pa.DataType, result: Any, row: int
) -> None:
    with pytest.raises(RefusedError) as caught:
        result_to_array(result, kind, refuse, first_row=10)
    assert caught.value.row == 10 + row


def test_masks_and_missing_values_are_null() -> None:
    masked = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    assert result_to_array(masked, pa.int64(), refuse).to_pylist() == [1, None, 3]
    square = np.ma.array([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]])
    for kind in (pa.list_(pa.int64()), pa.list_(pa.int64(), 2)):
        assert result_to_array(square, kind, refuse).to_pylist() == [[1, None], [3, 4]]
    series = pd.Series(["a", math.nan, None, pd.NA], dtype=object)
    assert result_to_array(series, pa.string(), refuse).to_pylist() == ["a", None, None, None]
    nullable = pd.Series([1, pd.NA], dtype="Int64")
    assert result_to_array(nullable, pa.int64(), refuse).to_pylist() == [1, None]
    assert values_to_array([nullable], pa.list_(pa.int64()), refuse).to_pylist() == [[1, None]]
    arrow = pa.array([1.5, None])
    assert values_to_array([arrow], pa.list_(pa.float64()), refuse).to_pylist() == [[1.5, None]]


def test_periods_are_no_ints_and_streams_are_no_generators() -> None:
    periods = pd.Series(pd.period_range("2024-01", periods=2, freq="M"))
    with pytest.raises(RefusedError, match="can't hold"):
        result_to_array(periods, pa.int64(), refuse)
    rows = pa.table({"a": [1, 2]})
    array = result_to_array(rows.to_reader(), pa.struct({"a": pa.int64()}), refuse)
    assert array.to_pylist() == [{"a": 1}, {"a": 2}]


def test_a_generator_is_a_batch() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    assert result_to_array(numbers(), pa.int8(), refuse).to_pylist() == [0, 1, 2]


def test_an_array_with_broken_buffers_is_refused() -> None:
    bad = pa.DictionaryArray.from_arrays(pa.array([5], pa.int8()), pa.array(["a"]), safe=False)
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    for result, kind in ((bad, DICTIONARY), (text, pa.string())):
        with pytest.raises(RefusedError):
            result_to_array(result, kind, refuse)


def test_what_a_value_raises_while_it_is_read_is_its_rows_failure() -> None:
    class Tensor:
        def __array__(self, *_: Any, **__: Any) -> NoReturn:
            raise RuntimeError("it requires grad")

    with pytest.raises(RefusedError, match="it requires grad") as caught:
        values_to_array([[1.0], Tensor()], pa.list_(pa.float32()), refuse)
    assert caught.value.row == 1
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RefusedError) as caught:
        values_to_array([[["a"]], endless], pa.list_(pa.list_(pa.string())), refuse)
    assert caught.value.row == 1


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "M8[us]"])
def test_a_million_numbers_make_no_python_objects(dtype: str) -> None:
    """Counted, not timed: rows of numpy arrays are joined, and never iterated over."""

    class Counting(np.ndarray):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            pytest.fail("iterated over")

    kinds = {"f4": pa.float32(), "f8": pa.float32(), "i8": pa.int64(), "M8[us]": pa.timestamp("ms")}
    row = (np.arange(1_000) * 1_000).astype(dtype).view(Counting)
    array = values_to_array([row] * 1_000, pa.list_(kinds[dtype], 1_000), refuse)
    assert len(array.values) == 1_000_000
