"""Digests of Arrow values, row by row, that depend on nothing but the values.

The same logical value has the same digest whatever its layout: slices and offsets, dictionaries,
string and list widths, integer and float widths, chunk borders, storage formats, platforms and
releases. The numbers below are part of the format on disk: tests hold golden digests of them.

Every value has a 64-bit *code*. A fixed-width value's code is its bits; the code of anything that
has parts is a keyed sum over the codes of its parts, with a key per position. Codes are scrambled
before they are summed, and a row's sum once more, so that equal digests mean equal values for all
purposes (2^-47 for the bits that a receipt keeps). They are no protection against somebody who
constructs collisions on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from geneva.model.rows import bounded_runs

Digests: TypeAlias = npt.NDArray[np.uint64]

_BLOCK_ROWS = 32_768
"""Rows of fixed-width values that are digested at once: their temporaries stay in the cache."""
_BLOCK_BYTES = 1024 * 1024
"""Bytes of variable-width values, and of lists, that are digested at once. Of half as many, twice
as many steps let go of the interpreter: a function that is called meanwhile waits for them."""
_LONG_BYTES = 16 * 1024
"""Values of so many bytes are digested one by one: images several times as fast as together."""

_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)
_FINISH_1 = np.uint64(0xFF51AFD7ED558CCD)
_FINISH_2 = np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)
_33 = np.uint64(33)
_LENGTH_KEY = np.uint64(0xD6E8FEB86659FD93)
_NULL = np.uint64(0xA0761D6478BD642F)
_LARGE_UNSIGNED = np.uint64(0xE7037ED1A0B428DB)
"""Tells an unsigned value of 2^63 or more from the negative number with the same bits."""
_NAN = np.uint64(0x7FF8000000000000)


def seed_of(text: str) -> int:
    """A 64-bit number that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def digest_rows(columns: Sequence[pa.Array], seed: int, rows: int) -> Digests:
    """Digest the rows of several columns of equal length, in order, with what `seed` stands for."""
    digests = np.empty(rows, dtype=np.uint64)
    columns = [_without_dictionary(column) for column in columns]
    for start in range(0, rows, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, rows)
        total = _total(columns, start, end)
        total += np.uint64(seed)
        digests[start:end] = _finished(total)
    return digests


def digest_values(columns: Sequence[pa.Array], rows: int) -> npt.NDArray[np.uint16]:
    """A short digest of each row, never 0: enough to notice that somebody wrote another value.

    That of a row of NULLs is no other row's: a NULL that somebody wrote is always noticed.
    """
    short = np.empty(rows, dtype=np.uint16)
    null_total = _total([pa.nulls(1)] * len(columns), 0, 1)[0]
    null_short = int(_shortened(np.array([null_total]))[0])
    columns = [_without_dictionary(column) for column in columns]
    for start in range(0, rows, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, rows)
        total = _total(columns, start, end)
        has_value = total != null_total
        part = _shortened(total)
        part[has_value & (part == null_short)] = null_short - 1 or 2
        short[start:end] = part
    return short


def _shortened(total: Digests) -> npt.NDArray[np.uint16]:
    """16 bits of each total, which the caller gives away; never 0."""
    total ^= total >> _HALF
    total *= _FINISH_1
    total >>= np.uint64(48)
    short = total.astype(np.uint16)
    short[short == 0] = 1
    return short


def _total(columns: Sequence[pa.Array | Digests], start: int, end: int) -> Digests:
    """The keyed sum over the codes of a row's columns."""
    total: Digests | None = None
    for position, column in enumerate(columns):
        codes = _scrambled(_part(column, start, end))
        codes *= _key(position)
        if total is None:
            total = codes
        else:
            total += codes
    return np.zeros(end - start, dtype=np.uint64) if total is None else total


def _without_dictionary(column: pa.Array) -> pa.Array | Digests:
    """The codes of a dictionary column: its dictionary is digested once, however many blocks."""
    return _dictionary_codes(column) if pa.types.is_dictionary(column.type) else column


def _part(column: pa.Array | Digests, start: int, end: int) -> Digests:
    if isinstance(column, np.ndarray):
        return column[start:end].copy()
    return _codes(column.slice(start, end - start))


# ------------------------------------------------------------------------------------- arithmetic


def _scrambled(codes: Digests) -> Digests:
    """Spread the bits of codes that the caller gives away.

    High bits down first: floats that differ in their sign or exponent differ in these alone.
    """
    shifted = codes >> _HALF
    codes ^= shifted
    codes *= _SCRAMBLE
    codes ^= np.right_shift(codes, _HALF, out=shifted)
    return codes


def _finished(total: Digests) -> Digests:
    shifted = total >> _33
    total ^= shifted
    total *= _FINISH_1
    total ^= np.right_shift(total, _33, out=shifted)
    total *= _FINISH_2
    total ^= np.right_shift(total, _33, out=shifted)
    return total


def _made_keys(positions: Digests) -> Digests:
    """An odd key for each position."""
    return _finished((positions + np.uint64(1)) * _SCRAMBLE) | np.uint64(1)


_KEY_COUNT = 65_536
_KEYS = _made_keys(np.arange(_KEY_COUNT, dtype=np.uint64))
"""The keys of the first positions. Further on they come again, each time changed in their bits."""


def _change_of(block: int) -> int:
    """What is changed in the keys of a block of positions: no bit in the first, never the last."""
    return seed_of(f"geneva keys: {block}") & ~1 if block else 0


def _key(position: int) -> np.uint64:
    block, place = divmod(position, _KEY_COUNT)
    return np.uint64(int(_KEYS[place]) ^ _change_of(block))


def _key_block(block: int, count: int) -> Digests:
    """The first keys of a block."""
    keys = _KEYS[:count]
    return keys ^ np.uint64(_change_of(block)) if block else keys


def _keys_at(positions: npt.NDArray[np.int64]) -> Digests:
    if not len(positions) or int(positions.max()) < _KEY_COUNT:
        return _KEYS[positions]
    blocks = positions // _KEY_COUNT
    changes = np.array([_change_of(i) for i in range(int(blocks.max()) + 1)], dtype=np.uint64)
    return _KEYS[positions % _KEY_COUNT] ^ changes[blocks]


def _tag(text: str) -> np.uint64:
    return np.uint64(seed_of(f"geneva digest: {text}"))


_BOOL, _INT, _FLOAT = _tag("bool"), _tag("int"), _tag("float")
_STRING, _BYTES, _LIST, _MAP = _tag("string"), _tag("bytes"), _tag("list"), _tag("map")


# ------------------------------------------------------------------------------------------ codes


def _codes(array: pa.Array) -> Digests:
    """A code for each value; NULLs have one of their own. The caller may write to it."""
    if isinstance(array, pa.ChunkedArray):
        parts = [_codes(chunk) for chunk in array.chunks]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
    if isinstance(array, pa.ExtensionArray):
        return _codes(array.storage)
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL, dtype=np.uint64)
    if pa.types.is_dictionary(kind):
        return _dictionary_codes(array)
    if pa.types.is_run_end_encoded(kind):
        return _codes(pc.run_end_decode(array))
    codes = _valid_codes(array)
    if array.null_count:
        codes[np.asarray(array.is_null())] = _NULL
    return codes


def _valid_codes(array: pa.Array) -> Digests:
    """Codes of the values that are not NULL; what the others get is of no interest."""
    kind, types = array.type, pa.types
    if types.is_struct(kind):
        return _struct_codes(array)
    if types.is_map(kind):
        return _list_codes(array, array.keys, array.items, tag=_MAP)
    if types.is_fixed_size_list(kind):
        return _fixed_list_codes(array)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _list_codes(_without_view(array), tag=_LIST)
    if types.is_list(kind) or types.is_large_list(kind):
        return _list_codes(array, tag=_LIST)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        wide = pa.large_string() if types.is_string_view(kind) else pa.large_binary()
        return _valid_codes(array.cast(wide))
    if types.is_string(kind) or types.is_large_string(kind):
        return _text_codes(array, _STRING)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _text_codes(array, _BYTES)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return _text_codes(array.cast(pa.binary()), _BYTES)
    return _fixed_codes(array)


def _dictionary_codes(array: pa.Array) -> Digests:
    values = _codes(array.dictionary)
    if not len(values):
        return np.full(len(array), _NULL, dtype=np.uint64)
    codes = values[np.asarray(array.indices.fill_null(0))]
    if array.indices.null_count:
        codes[np.asarray(array.indices.is_null())] = _NULL
    return codes


def _fixed_codes(array: pa.Array) -> Digests:
    kind, types = array.type, pa.types
    if types.is_boolean(kind):
        return _bits(array.cast(pa.uint8())).astype(np.uint64) ^ _BOOL
    if types.is_floating(kind):
        numbers = _bits(array)
        with np.errstate(invalid="ignore"):  # said of NaNs of some bits, also where it is NULL
            bits = numbers.astype(np.float64).view(np.uint64)
        if len(numbers) and np.isnan(numbers.min()):  # that of a NaN and anything is a NaN
            bits[np.isnan(numbers)] = _NAN
        bits ^= _FLOAT
        return bits
    if types.is_integer(kind):
        wide = np.int64 if types.is_signed_integer(kind) else np.uint64
        codes: Digests = _bits(array).astype(wide).view(np.uint64)
        if kind == pa.uint64():
            codes[codes >> np.uint64(63) != 0] ^= _LARGE_UNSIGNED
        codes ^= _INT
        return codes
    if types.is_decimal(kind):
        return _decimal_codes(array)
    # Dates, times, timestamps, durations, intervals: their numbers, and what these count.
    width = kind.bit_width // 8
    if width == 4:
        return _bits_as(array, np.int32).astype(np.int64).view(np.uint64) ^ _tag(str(kind))
    words = _bits_as(array, np.uint64).reshape(len(array), -1)
    return _words_codes(words, _tag(str(kind)))


def _decimal_codes(array: pa.Array) -> Digests:
    """The unscaled number and its scale, whatever the width."""
    kind = array.type
    if kind.bit_width < 128:
        array = array.cast(pa.decimal128(kind.precision, kind.scale))
    words = _bits_as(array, np.uint64).reshape(len(array), -1)
    if words.shape[1] < 4:
        sign = (words[:, -1].view(np.int64) >> np.int64(63)).view(np.uint64)
        words = np.column_stack([words, sign, sign])
    return _words_codes(words, _tag(f"decimal {kind.scale}"))


def _words_codes(words: Any, tag: np.uint64) -> Digests:
    if words.shape[1] == 1:
        return words[:, 0] ^ tag
    total: Digests = _scrambled(words.copy()) @ _KEYS[: words.shape[1]]
    return total ^ tag


def _bits(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers of a fixed-width array; anything where it is NULL."""
    return _bits_as(array, array.type.to_pandas_dtype())


def _bits_as(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    per_value = (array.type.bit_width // 8) // size
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array) * per_value, dtype=dtype)
    first = array.offset * per_value
    return np.frombuffer(buffer, dtype=dtype, count=len(array) * per_value, offset=first * size)


def _struct_codes(array: pa.Array) -> Digests:
    kind = array.type
    names = "\0".join(kind.field(i).name for i in range(kind.num_fields))
    total = np.zeros(len(array), dtype=np.uint64)
    for i in range(kind.num_fields):
        child = array.field(i)
        if len(child) != len(array):  # a slice of a struct gives its children whole
            child = child.slice(array.offset, len(array))
        total += _scrambled(_codes(child)) * _key(i)
    return total ^ _tag(f"struct {names}")


def _fixed_list_codes(array: pa.Array) -> Digests:
    size, rows = array.type.list_size, len(array)
    lengths = np.full(rows, size, dtype=np.uint64) * _LENGTH_KEY
    if not size or not rows:
        return lengths ^ _LIST
    codes = np.empty(rows, dtype=np.uint64)
    keys = _keys_at(np.arange(size))
    step = max(1, _BLOCK_BYTES // (8 * size))
    for at in range(0, rows, step):
        some = min(step, rows - at)
        items = array.values.slice((array.offset + at) * size, some * size)
        # By einsum, which sums integers half again as fast as `@`.
        scrambled = _scrambled(_codes(items)).reshape(some, size)
        codes[at : at + some] = np.einsum("ij,j->i", scrambled, keys)
    codes += lengths
    codes ^= _LIST
    return codes


def _without_view(array: pa.Array) -> pa.Array:
    """List views as lists: a view's items may be anywhere, in any order."""
    lengths = np.asarray(pc.list_value_length(array).fill_null(0))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(ends), array.flatten())


def _list_codes(array: pa.Array, *values: pa.Array, tag: np.uint64) -> Digests:
    """Lists, and maps as lists of pairs: a sum over the items of each."""
    ends = np.asarray(array.offsets).astype(np.int64)
    columns = values or (array.values,)
    lengths = np.diff(ends)
    sums = np.empty(len(array), dtype=np.uint64)
    for first, last in bounded_runs(lengths * 8, _BLOCK_BYTES):
        start, stop = int(ends[first]), int(ends[last])
        items = np.zeros(stop - start, dtype=np.uint64)
        for position, column in enumerate(columns):
            codes = _scrambled(_codes(column.slice(start, stop - start)))
            items += codes if len(columns) == 1 else codes * _key(position)
        places = ends[first : last + 1] - start
        within = np.arange(stop - start) - np.repeat(places[:-1], lengths[first:last])
        items *= _keys_at(within)
        sums[first:last] = _sums_between(items, places)
    sums += lengths.astype(np.uint64) * _LENGTH_KEY
    sums ^= tag
    return sums


def _sums_between(items: Digests, places: npt.NDArray[np.int64]) -> Digests:
    """The sum of each run of items, modulo 2^64."""
    running = np.zeros(len(items) + 1, dtype=np.uint64)
    np.cumsum(items, out=running[1:])
    sums: Digests = running[places[1:]] - running[places[:-1]]
    return sums


def _text_codes(array: pa.Array, tag: np.uint64) -> Digests:
    """Strings and bytes: a sum over their words of eight bytes, the last one filled with zeros."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return np.full(len(array), tag, dtype=np.uint64)
    dtype = np.int64 if wide else np.int32
    skipped = array.offset * np.dtype(dtype).itemsize
    ends = np.frombuffer(offsets, dtype, len(array) + 1, skipped).astype(np.int64)
    lengths = np.diff(ends)
    sums = np.empty(len(array), dtype=np.uint64)
    for first, last in bounded_runs(lengths, _BLOCK_BYTES):
        if ends[last] - ends[first] >= _LONG_BYTES * (last - first):
            for row in range(first, last):
                sums[row] = _long_text_sum(data, int(ends[row]), int(ends[row + 1]))
        else:
            sums[first:last] = _text_sums(data, ends[first : last + 1])
    sums += lengths.astype(np.uint64) * _LENGTH_KEY
    sums ^= tag
    return sums


def _text_sums(data: pa.Buffer, ends: npt.NDArray[np.int64]) -> Digests:
    start, stop = int(ends[0]), int(ends[-1])
    padded = np.zeros(stop - start + 8, dtype=np.uint8)
    padded[:-8] = np.frombuffer(data, dtype=np.uint8, count=stop - start, offset=start)
    # Eight bytes from anywhere: an overlapping view, of which only some places are read.
    anywhere = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded.data, strides=(1,))
    starts = ends[:-1] - start
    lengths = np.diff(ends)
    counts = (lengths + 7) >> 3
    places = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=places[1:])
    within = np.arange(int(places[-1])) - np.repeat(places[:-1], counts)
    words = anywhere[np.repeat(starts, counts) + 8 * within].astype(np.uint64)
    odd = np.flatnonzero(lengths & 7)
    last = places[1:][odd] - 1
    words[last] &= (np.uint64(1) << (8 * (lengths[odd] & 7)).astype(np.uint64)) - np.uint64(1)
    words = _scrambled(words)
    words *= _keys_at(within)
    return _sums_between(words, places)


def _long_text_sum(data: pa.Buffer, start: int, stop: int) -> np.uint64:
    """The same sum for one value of any length, in bounded memory."""
    total = np.zeros(1, dtype=np.uint64)
    step = 8 * _KEY_COUNT
    for block, at in enumerate(range(start, stop, step)):
        size = min(step, stop - at)
        padded = np.zeros(-(-size // 8) * 8, dtype=np.uint8)
        padded[:size] = np.frombuffer(data, dtype=np.uint8, count=size, offset=at)
        words = _scrambled(padded.view("<u8").astype(np.uint64, copy=False))
        total += words @ _key_block(block, len(words))
    return np.uint64(total[0])
